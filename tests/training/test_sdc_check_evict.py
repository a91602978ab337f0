"""`sdc_check.on_difference: evict`: a machine or rank that computes wrongly is evicted, and the job goes on."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.data.job import Job
from lockstep.distributed import job_record
from lockstep.training.resolve import Machine, resolve, resolve_strategy
from lockstep.training.sdc_check import check_eviction, decide_eviction, third_of
from support.command import LOCKSTEP, CommandJob, bits, each_step_once, ended, start, write
from support.harness import TINY
from support.marks import long, slow
from support.messages import mentions, raises
from support.places import TESTS_PATH

MACHINES = ("launch.name=torchrun", "launch.machines=2:4", "launch.rendezvous=h:1", "launch.max_restarts=2")
RANKS = ("launch.on_rank_failure=continue",)
EXCLUDE = ("sdc_check.every=1", "sdc_check.on_difference=evict")


# -- refusals before a process starts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("launch.name=local",),
        ("launch.name=slurm", "launch.on_rank_failure=continue"),
        ("launch.name=torchrun", "launch.machines=3", "launch.rendezvous=h:1", "launch.on_rank_failure=continue"),
        (*MACHINES, "launch.on_rank_failure=continue"),  # machines are evicted by a restart
        ("launch.name=torchrun", "launch.machines=3:3", "launch.rendezvous=h:1", "launch.max_restarts=2"),
    ],
)
def test_evict_is_refused_if_no_rank_can_be_removed(words: tuple[str, ...]) -> None:
    with raises("LS5132"):
        resolve_strategy(load(None, [*EXCLUDE, *words], TINY), 3)
    assert load(None, ["sdc_check.on_difference=evict", *words], TINY).sdc_check.every == 0  # sdc_check is off


@pytest.mark.parametrize("words", [MACHINES, RANKS, ("launch.name=torchrun", "launch.on_rank_failure=continue")])
def test_evict_is_accepted(words: tuple[str, ...]) -> None:
    run = load(None, [*EXCLUDE, *words], TINY)
    assert resolve_strategy(run, 3) is not None


def test_missing_support_for_lost_ranks_is_reported_before_the_first_step() -> None:
    with raises("LS5154"):
        check_eviction(Job.of(load(None, [*EXCLUDE, *RANKS], TINY)), "the model is compiled")
    check_eviction(Job.of(load(None, ["sdc_check.every=1", *RANKS], TINY)), "the model is compiled")  # which only stops
    check_eviction(Job.of(load(None, [*EXCLUDE, *MACHINES], TINY)), "it takes one machine")  # where machines leave


def test_evict_is_refused_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with raises("LS5154"):
        resolve(load(None, [*EXCLUDE, *RANKS, "average.ema=0.9"], TINY), Machine(), 3)
    assert resolve(load(None, [*EXCLUDE, *RANKS], TINY), Machine(), 3)  # control
    sharded = load(None, ["sdc_check.every=1", "strategy.name=fsdp2"], TINY)
    assert resolve(sharded, Machine(), 2)  # it fits
    monkeypatch.setattr("lockstep.distributed.system_metrics.capacity", lambda device, sharing: 10)
    with raises("LS5150"):
        resolve(sharded, Machine(), 2)


def test_ranks_that_another_program_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr("multiprocessing.parent_process", lambda: None)
    with raises("LS5155"):
        check_eviction(Job.of(load(None, [*EXCLUDE, *MACHINES], TINY)), None)


# -- the vote and the eviction ---------------------------------------------------------------------------------------


def test_third_computation_runs_on_a_third_machine() -> None:
    assert third_of(0, 0, ["a"]) == 0
    assert third_of(0, 1, ["a"] * 2) == 0
    assert third_of(0, 1, ["a"] * 3) == 2
    assert third_of(2, 0, ["a"] * 3) == 1
    assert third_of(1, 2, ["a", "a", "b", "b", "c"]) == 4
    assert third_of(4, 0, ["a", "a", "b", "b", "c"]) == 2
    assert third_of(1, 2, ["a", "a", "b", "b"]) == 3


@pytest.mark.parametrize(
    ("more", "hosts", "wrong", "told", "said", "out"),
    [
        (MACHINES, "abc", [1], [0, 1, 2], "b is evicted, and the job continues without it", [1]),
        (MACHINES, "aabbcc", [2], [1, 2, 4], "b is evicted", [2, 3]),
        (MACHINES, "abc", [], [0, 1, 2], "nothing is evicted: computations by three machines", []),
        (MACHINES, "ab", [1], [0, 1, 0], "nothing is evicted: computations by three machines", []),
        (MACHINES, "aab", [1], [0, 1, 2], "nothing is evicted: computations by three machines", []),
        (("launch.machines=3:4",), "abc", [1], [0, 1, 2], "b is not evicted, because launch.machines needs at", []),
        (RANKS, "aaa", [1], [0, 1, 2], "rank 1 is evicted", [1]),
        (RANKS, "aa", [1], [0, 1, 0], "nothing is evicted: computations by three ranks", []),
        (("sdc_check.on_difference=stop",), "abc", [1], [0, 1, 2], "remove that machine from the job", []),
    ],
)
def test_which_ranks_are_evicted(
    more: tuple[str, ...], hosts: str, wrong: list[int], told: list[int], said: str, out: list[int]
) -> None:
    run = load(None, [*EXCLUDE, *(() if more == RANKS else MACHINES), *more], TINY)
    words, leaves = decide_eviction(Job.of(run), list(hosts), wrong, told)
    assert words.startswith(said)
    assert leaves == out


# -- the record of evictions -----------------------------------------------------------------------------------------


def test_an_evicted_machine_is_not_admitted_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    host, folder = socket.gethostname(), tmp_path / "out"
    run = load(None, ["launch.processes=1"], TINY | {"output": str(folder)})
    (tmp_path / "run.yaml").write_text(run.dump())
    job_record.note_eviction(folder, "other", 3)
    job_record.refuse_evicted(folder)
    job_record.note_eviction(folder, host, 9)
    job_record.note_eviction(folder, host, 9)
    (folder / "excluded-torn.json").write_text('{"host"')
    assert [str(each) for each in job_record.evictions_of(folder)] == [
        "other, which computed wrong values in step 3 (sdc_check)",
        f"{host}, which computed wrong values in step 9 (sdc_check)",
    ]
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert mentions(said, "LS7004", str(host))
    assert mentions(said, "LS7004", str(folder), "/excluded-", str(host), ".json")
    assert not (folder / "checkpoints").exists()


# -- one machine -----------------------------------------------------------------------------------------------------


def guarded(folder: Path, cache: Path, strategy: str, *words: str) -> tuple[int, str, str]:
    write(folder)
    options = [
        "launch.processes=3",
        "launch.on_rank_failure=continue",
        f"strategy.name=support.faulty_host.{strategy}",
        *EXCLUDE,
    ]
    return ended(start([*LOCKSTEP, "train", "run.yaml", *options, *words], folder, cache, PYTHONPATH=TESTS_PATH), 600)


def differences(folder: Path) -> list[dict[str, Any]]:
    told = [json.loads(line) for line in (folder / "out/events.jsonl").read_text().splitlines()]
    return [event for event in told if event["event"] == "guard"]


@pytest.mark.processes
@pytest.mark.usefixtures("nobody_is_left")
def test_a_stopped_job_is_not_restarted(tmp_path: Path, job: CommandJob) -> None:
    job.write(steps=9)
    words = [
        "launch.processes=2",
        "launch.max_restarts=2",
        "strategy.name=support.planted_mistakes.BitFlip",
        "sdc_check.every=1",
    ]
    status, _, err = ended(job.start(*words, PYTHONPATH=TESTS_PATH), 600)
    assert status == 1
    assert "sdc_check: step 6: rank" in err
    assert "restarting" not in err
    assert json.loads((tmp_path / "out/checkpoints/latest/manifest.json").read_text())["step"] == 5
    assert json.loads((tmp_path / "out/launch.json").read_text())["status"] == 1
    (found,) = differences(tmp_path)
    assert (found["step"], found["ranks_out"]) == (5, [])


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("nobody_is_left")
@pytest.mark.parametrize("strategy", ["WrongRank", long("WrongFirstRank"), slow("WrongWeightOfRank")])
def test_a_faulty_rank_is_evicted(strategy: str, tmp_path: Path, cache: Path, untouched: Path) -> None:
    """The others finish the step, with the bits of a job without that rank; no rank replaces it."""
    rank = {"WrongRank": 1, "WrongFirstRank": 0, "WrongWeightOfRank": 2}[strategy]
    status, _, err = guarded(tmp_path, cache, strategy, "launch.max_restarts=3")
    assert status == 0, err
    assert f"rank process {rank} of {socket.gethostname()} computed wrong values (sdc_check) and is evicted" in err
    log = " ".join((tmp_path / "out/log.txt").read_text().split())
    assert f"rank {rank} is evicted, and the job continues without it" in log
    assert f"rank {rank} was lost; 2 ranks continue from step" in log
    assert "joined with the state of the others" not in log
    assert "resuming after step" not in log
    (found,) = differences(tmp_path)
    assert (found["ranks_out"], found["out"]) == ([rank], [f"rank {rank}"])
    assert f"rank {rank} computed wrongly and was evicted" in (tmp_path / "out/report.html").read_text()
    assert found["step"] >= 8
    assert found["weights_agree"] is (strategy != "WrongWeightOfRank")
    assert bits(tmp_path) == bits(untouched)
    each_step_once(tmp_path, untouched)
    assert job_record.evictions_of(tmp_path / "out") == []  # a later start may use all ranks again
