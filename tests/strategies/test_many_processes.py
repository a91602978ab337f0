"""32 real processes, and 24 that share 32 micro-batches unevenly, have the bits of one."""

import gc
from typing import Any

import pytest

from lockstep.config.run import Run
from lockstep.config.schedules import learning_rate
from lockstep.distributed.world import World
from lockstep.strategies.exact.reduce_schedule import LinkSpeeds
from support.harness import build_with_feed, digest, run_on, tiny

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 3
EXACT = {
    "allreduce": ("strategy.name=allreduce",),
    "ddp": ("strategy.name=ddp",),
    "fsdp2 step": ("strategy.name=fsdp2", "strategy.options.gather=step"),
    "fsdp2 micro_batch": ("strategy.name=fsdp2", "strategy.options.gather=micro_batch"),
}


def steps_of(world: World, run: Run) -> dict[str, Any]:
    """Return the results of three steps and the digest of the full state."""
    _, strategy, feed = build_with_feed(run, world)
    results = [strategy.train_step(feed.make(t), learning_rate(run.optim, t, STEPS)) for t in range(STEPS)]
    whole = strategy.state.state_dict()
    found = {
        "state": digest(whole) if world.is_main else None,
        "steps": [(float(r.loss), float(r.grad_norm)) for r in results],
        "ranks": world.size,
        "leaves": len(list(strategy.own_micro_batches())),
    }
    strategy.close()
    gc.collect()
    return found


def of(ranks: int, *words: str) -> list[dict[str, Any]]:
    run = tiny(*words, "micro_batches=32", "batch_size=37")
    return run_on(ranks, steps_of, run, timeout_s=900)


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return of(1, "strategy.name=single")[0]


@pytest.mark.parametrize("exchange", ["auto", "flat"])
@pytest.mark.parametrize("ranks", [24, 32])
@pytest.mark.parametrize("name", EXACT)
def test_many_processes_have_the_bits_of_one(name: str, ranks: int, exchange: str, single: dict[str, Any]) -> None:
    assert LinkSpeeds("auto").tree(ranks)
    found = of(ranks, *EXACT[name], f"strategy.all_reduce={exchange}")
    assert {each["ranks"] for each in found} == {ranks}
    assert {each["leaves"] for each in found} == ({1, 2} if ranks == 24 else {1})
    assert found[0]["state"] == single["state"]
    assert all(each["steps"] == single["steps"] for each in found)
