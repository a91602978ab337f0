"""`launch.on_rank_failure: continue`: ranks are killed at any moment, and the others finish the step. No checkpoint is
read, and the bits are those of an uninterrupted job."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from support import rank_kills
from support.command import (
    CommandJob,
    bits,
    each_step_once,
    ended,
    until,
)
from support.marks import long, slow
from support.places import TESTS_PATH

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at sockets through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
    pytest.mark.timeout(900),
]
HANG_S = 12  # on a busy machine a rank may get no CPU time for six seconds, which is no failure


# other tests cover `allreduce` in each CI run: the last rank alone, and a stopped rank
@pytest.mark.parametrize("strategy", ["StruckDDP", long("StruckAllReduce")])
def test_surviving_ranks_finish_the_step(strategy: str, tmp_path: Path, cache: Path, untouched: Path) -> None:
    """Ranks fail within the all-reduce, while the group is re-formed, after an update that others have not made, and
    rank 0 while it saves and evaluates. Replacements get the state from the survivors."""
    strikes = [(3, 1, "sent", 3), (4, 1, "meeting", 2), (7, 0, "saving", 2), (15, 0, "evaluation", 2)]
    strikes += [(25, 2, "summed", 3), (31, 0, "updated", 2), (33, 1, "agreed", 2), (34, 0, "joining", 3)]
    done = rank_kills.carried_out(rank_kills.job_of(strategy, 3, *strikes), tmp_path / "job", cache, untouched)
    assert [each["phase"] for each in done.done] == [phase for _, _, phase, _ in strikes]
    assert done.restarted == 0
    told = [json.loads(line) for line in (tmp_path / "job/out/events.jsonl").read_text().splitlines()]
    regrouped = [event for event in told if event["event"] == "regroup"]
    assert len(regrouped) >= len(strikes)
    assert {event["processes"] for event in regrouped} >= {2, 3}
    log = (tmp_path / "job/out/log.txt").read_text()
    assert "joined with the state of the others" in log
    assert "rank 0 was lost" in log
    assert "resuming after step" not in log


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["StruckDDP", "StruckAllReduce"])
def test_a_rank_fails_while_another_joins_or_while_it_writes(
    strategy: str, tmp_path: Path, cache: Path, untouched: Path
) -> None:
    """Ranks fail while they send state to a replacement and while they write a checkpoint file; rank 0 fails between
    writing all files and renaming the folder, and then again."""
    strikes = [(3, 2, "sent", 3), (3, 0, "handing", 2), (8, 1, "writing", 3), (18, 0, "naming", 3), (19, 0, "agree", 2)]
    done = rank_kills.carried_out(rank_kills.job_of(strategy, 3, *strikes), tmp_path / "job", cache, untouched)
    assert [each["phase"] for each in done.done] == [phase for _, _, phase, _ in strikes]
    assert done.restarted == 0
    kept = tmp_path / "job" / "out" / "checkpoints"
    assert not [path.name for path in kept.iterdir() if path.name.endswith(".partial")]


def test_without_replacements_the_last_rank_trains_alone(tmp_path: Path, cache: Path, untouched: Path) -> None:
    strikes = [(5, 0, "forward", 3), (12, 1, "gradient", 2)]
    done = rank_kills.carried_out(
        rank_kills.job_of("StruckAllReduce", 3, *strikes), tmp_path / "job", cache, untouched, replaced=0
    )
    assert [(each["phase"], each["world"]) for each in done.done] == [("forward", 3), ("gradient", 2)]
    manifest = json.loads((tmp_path / "job/out/checkpoints/step-000040/manifest.json").read_text())
    assert manifest["world_size"] == 1
    assert done.restarted == 0


@pytest.mark.parametrize("rank", [1, slow(0)])
def test_a_suspended_rank_is_awaited_and_then_killed(
    rank: int, tmp_path: Path, job: CommandJob, untouched: Path
) -> None:
    """SIGSTOP for less than `hang_timeout_s` only costs time; after that the rank is killed, and the others go on."""
    job.write()
    options = [
        "launch.on_rank_failure=continue",
        "launch.processes=3",
        f"launch.hang_timeout_s={HANG_S}",
        "strategy.name=allreduce",
    ]
    process = job.start(*options)
    until(lambda: job.step() >= 5, "step 5", process)
    main = json.loads((tmp_path / "out" / "launch.json").read_text())["main"]["pid"]
    others = [pid for pid in job.ranks(process) if pid != main]
    frozen = main if rank == 0 else others[0]
    os.kill(frozen, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(frozen, signal.SIGCONT)
    until(lambda: job.step() >= 15, "step 15", process)
    assert "was lost" not in (tmp_path / "out/log.txt").read_text()
    os.kill(frozen, signal.SIGSTOP)
    status, out, err = ended(process)
    assert status == 0, err
    assert err.count(f"no heartbeat for {HANG_S} s") == 1
    assert f"note: rank {rank if rank == 0 else 1} was lost; 2 ranks continue from step" in out
    assert "resuming after step" not in out
    assert job.bits() == bits(untouched)
    each_step_once(tmp_path, untouched)


def test_a_stop_signal_to_a_joining_process(tmp_path: Path, job: CommandJob) -> None:
    """The signal arrives when the new process exists but does not yet handle signals; no other process gets it."""
    job.write(steps=400, checkpoint={"every": 1000}, evaluate={"every": 1000})
    (tmp_path / "hold").write_text("5")
    options = [
        "launch.on_rank_failure=continue",
        "launch.max_restarts=1",
        "strategy.name=support.waiting_at_steps.HeldTogether",
    ]
    process = job.start(*options, PYTHONPATH=TESTS_PATH)
    until(lambda: job.step() >= 5, "step 5", process)
    before = job.ranks(process)
    os.kill(before[1], signal.SIGKILL)
    until(lambda: set(job.ranks(process)) - set(before), "another", process)
    (comes,) = set(job.ranks(process)) - set(before)
    os.kill(comes, signal.SIGTERM)
    status, out, err = ended(process)
    assert status == 75, (out, err)
    assert "stopped on request after step" in out
    assert job.saved() >= 5
    assert "SIGTERM" not in err


def test_strategies_that_cannot_continue_restart_with_a_message(
    tmp_path: Path, job: CommandJob, untouched: Path
) -> None:
    """Sharded strategies restart, as without the key."""
    job.write()
    options = ["launch.on_rank_failure=continue", "launch.max_restarts=1", "strategy.name=fsdp2"]
    process = job.start(*options)
    kept = tmp_path / "out" / "checkpoints"
    until(lambda: any(kept.glob("step-*/manifest.json")), "a checkpoint", process)
    os.kill(job.ranks(process)[1], signal.SIGKILL)
    status, out, err = ended(process)
    assert status == 0, err
    assert "launch.on_rank_failure: continue is not possible (strategy fsdp2 keeps neither the whole state" in out
    assert "restarting from the last checkpoint (1 restart left)" in err
    assert "resuming after step" in out
    assert job.bits() == bits(untouched)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [long(seed) for seed in range(4)])
def test_random_failures(seed: int, tmp_path: Path, cache: Path) -> None:
    """Random failures, ten each for two to six ranks. LOCKSTEP_SEED sets the random choice."""
    untouched = rank_kills.untouched(tmp_path / "untouched", cache, values=rank_kills.VALUES)
    drawn = rank_kills.draw_job(seed + int(os.environ.get("LOCKSTEP_SEED", 0)), 10, 60)
    done = rank_kills.carried_out(drawn, tmp_path / "job", cache, untouched)
    assert done.equal
    assert len(done.done) == len(drawn.strikes)
    assert done.restarted == 0
