"""`launch.on_rank_failure: continue` with sharded state: the surviving ranks reassemble it from memory."""

import json
import os
import random
import sys
from pathlib import Path

import pytest

from support import rank_kills
from support.marks import long, slow
from support.messages import mentions
from support.rank_kills import job_of, untouched

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at sockets through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
    pytest.mark.timeout(900),
]
REPLICATED = ("strategy.options.replicate=2",)
COPIED = ("launch.replicate_every=2",)
LAYERS = "model.config.n_layer=4"  # so that each of three stages has at least one
# Strategies that are struck, and more words of their commands. Whether fsdp2 gathers once a step is said: what it
# decides by itself is a class that nobody strikes.
EACH_MICRO_BATCH, ONCE = "strategy.options.gather=micro_batch", "strategy.options.gather=step"
KINDS = {"StruckFSDP2": (EACH_MICRO_BATCH,), "StruckShardedOptimizer": (ONCE,), "StruckPipeline": (LAYERS,)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    return untouched(tmp_path_factory.mktemp("alone"), cache)


def layers(kind: str) -> list[str]:
    return [word for word in KINDS[kind] if word == LAYERS]


def moved(folder: Path) -> list[str]:
    told = [json.loads(line) for line in (folder / "out/events.jsonl").read_text().splitlines()]
    return [event["what"] for event in told if event["event"] == "regroup"]


def started_again(folder: Path, shard: str) -> str:
    """Check that the log names the lost shard and one restart from a checkpoint; return the log."""
    log = (folder / "out/log.txt").read_text()
    assert mentions(log, "LS5042", f"{shard} of the state")
    assert log.count("resuming after step") == 1
    return log


def test_shards_are_restored_from_peer_copies(tmp_path: Path, cache: Path, alone: Path) -> None:
    """`gather: step` on three ranks: one fails within a step, then rank 0 fails after its update."""
    strikes = [(5, 1, "agreed", 3), (11, 0, "updated", 3)]
    done = rank_kills.carried_out(
        job_of("StruckShardedOptimizer", 3, *strikes), tmp_path / "job", cache, alone, *COPIED
    )
    assert [each["phase"] for each in done.done] == [phase for _, _, phase, _ in strikes]
    assert done.restarted == 0
    told = moved(tmp_path / "job")
    assert sum("by copies in memory" in what for what in told) >= 2
    assert any("joined with the state of the others" in what for what in told)
    assert "resuming after step" not in (tmp_path / "job/out/log.txt").read_text()


@pytest.mark.parametrize(
    "phase", [slow("late"), long("updated"), long("step"), long("agreed"), long("saving"), long("evaluation")]
)
def test_one_replica_of_each_shard_is_enough_to_finish_the_step(
    phase: str, tmp_path: Path, cache: Path, alone: Path
) -> None:
    """Four ranks with two replicas lose no step, even if a rank (`late`) did not learn that all could update, and
    updates later on its own."""
    words: tuple[str, ...] = REPLICATED
    if phase == "evaluation":  # a loss in the one after the last step starts again
        words += ("evaluate.every=10",)
        alone = untouched(tmp_path / "alone", cache, "evaluate.every=10")
    done = rank_kills.carried_out(job_of("StruckFSDP2", 4, (3, 2, phase, 4)), tmp_path / "job", cache, alone, *words)
    assert [each["phase"] for each in done.done] == [phase]
    assert done.restarted == 0
    assert (tmp_path / "job/unheard").exists() == (phase == "late")
    assert not any("back from" in what for what in moved(tmp_path / "job"))


@pytest.mark.slow
def test_tensor_ranks_shrink_to_a_divisor_of_the_survivors(tmp_path: Path, cache: Path) -> None:
    """Two pairs of ranks share each matrix product: each of three survivors computes all leaves."""
    leaves = ("strategy.tensor_leaves=2",)
    alone = untouched(tmp_path / "alone", cache, *leaves)
    pairs = ("strategy.options.tensor_parallel=2", *leaves, *COPIED)
    done = rank_kills.carried_out(job_of("StruckFSDP2", 4, (5, 1, "agreed", 4)), tmp_path / "job", cache, alone, *pairs)
    assert [each["phase"] for each in done.done] == ["agreed"]
    assert done.restarted == 0
    assert any("by copies in memory" in what for what in moved(tmp_path / "job"))


@pytest.mark.slow
def test_losing_both_holders_of_a_shard_restarts_the_job_with_a_reason(
    tmp_path: Path, cache: Path, alone: Path
) -> None:
    """Two replicas: while the survivors form a group, a second rank fails, the other holder of the same shard."""
    strikes = [(13, 1, "step", 4), (13, 2, "forming", 3)]
    done = rank_kills.carried_out(
        job_of("StruckFSDP2", 4, *strikes, saved=10), tmp_path / "job", cache, alone, *REPLICATED
    )
    assert [each["phase"] for each in done.done] == ["step", "forming"]
    assert done.restarted == 1
    assert "resuming after step 10" in started_again(tmp_path / "job", "shard 1 of 2")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_losing_a_rank_and_then_its_peer(kind: str, tmp_path: Path, cache: Path) -> None:
    """A rank fails and is replaced, then the rank with its copy fails; later both fail before they are replaced. State
    that only they had in memory is lost, and all ranks restart and say so."""
    words = [*COPIED, *KINDS[kind]]
    alone = untouched(tmp_path / "alone", cache, *layers(kind), values=rank_kills.VALUES)
    strikes = [(5, 1, "agreed", 3), (7, 1, "agreed", 3), (23, 1, "step", 3), (23, 1, "forming", 2)]
    done = rank_kills.carried_out(job_of(kind, 3, *strikes), tmp_path / "job", cache, alone, *words)
    assert [(each["phase"], each["world"]) for each in done.done] == [(phase, world) for *_, phase, world in strikes]
    assert done.restarted == 1
    started_again(tmp_path / "job", "shard 1 of 3")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_losing_a_rank_and_a_sender_before_the_replacement_has_the_state(
    kind: str, tmp_path: Path, cache: Path
) -> None:
    """One rank fails, a replacement joins, and one of the ranks that send it state fails. The third rank has a copy of
    that rank's state, made while there were two."""
    alone = untouched(tmp_path / "alone", cache, *layers(kind), values=rank_kills.VALUES)
    strikes = [(5, 1, "agreed", 3), (5, 1, "handing", 3), (25, 0, "agreed", 3), (25, 0, "handing", 3)]
    done = rank_kills.carried_out(job_of(kind, 3, *strikes), tmp_path / "job", cache, alone, *COPIED, *KINDS[kind])
    assert [(each["phase"], each["world"]) for each in done.done] == [(phase, world) for *_, phase, world in strikes]
    assert done.restarted == 0
    assert sum("by copies in memory" in what for what in moved(tmp_path / "job")) >= 2


@pytest.mark.slow
@pytest.mark.long
def test_without_copies_losing_a_second_rank_restarts_the_job(tmp_path: Path, cache: Path, alone: Path) -> None:
    """Two replicas without copies in memory: three ranks have resharded the state when a second rank fails."""
    strikes = [(13, 1, "step", 4), (13, 2, "handing", 4)]
    done = rank_kills.carried_out(
        job_of("StruckFSDP2", 4, *strikes, saved=10), tmp_path / "job", cache, alone, *REPLICATED
    )
    assert [each["phase"] for each in done.done] == ["step", "handing"]
    assert done.restarted == 1
    started_again(tmp_path / "job", "shard 2 of 3")


@pytest.mark.slow
def test_a_pipeline_continues_with_fewer_stages(tmp_path: Path, cache: Path) -> None:
    alone = untouched(tmp_path / "alone", cache, LAYERS)
    strikes = [(5, 1, "agreed", 3)]
    done = rank_kills.carried_out(
        job_of("StruckPipeline", 3, *strikes), tmp_path / "job", cache, alone, LAYERS, *COPIED
    )
    assert done.restarted == 0
    assert any("by copies in memory" in what for what in moved(tmp_path / "job"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [long(seed) for seed in range(4)])
def test_random_failures(seed: int, tmp_path: Path, cache: Path) -> None:
    """Six failures, each with all ranks present. LOCKSTEP_SEED sets the random choice."""
    alone = untouched(tmp_path / "alone", cache, values=rank_kills.VALUES)
    chance = random.Random(seed + int(os.environ.get("LOCKSTEP_SEED", 0)))
    kind, world, options = chance.choice(
        [
            ("StruckFSDP2", 4, REPLICATED),
            ("StruckFSDP2", 3, (*COPIED, EACH_MICRO_BATCH)),
            ("StruckShardedOptimizer", 3, COPIED),
        ]
    )
    phases = ("step", "agreed", "update", "updated", "agree")
    strikes = [(4 + 8 * i, chance.randint(0, 5), chance.choice(phases), world) for i in range(6)]
    done = rank_kills.carried_out(job_of(kind, world, *strikes), tmp_path / "job", cache, alone, *options)
    assert done.equal
    assert len(done.done) == len(strikes)
    assert done.restarted == 0
