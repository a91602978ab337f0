"""Memory predicted by plans, and real memory of ranks."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

from lockstep.config.run import Run
from lockstep.distributed.world import World
from lockstep_plan.fake_world import Simulated, middle, simulate
from lockstep_plan.simulated import Storages
from support.harness import build_with_feed

NEAR = 0.05


MODEL = {"type": "gpt2", "config": {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 32}}


DEEP = MODEL | {"config": {**MODEL["config"], "n_layer": 4}}  # some layers are prefetched, and each stage gets one


@dataclass
class Taken:
    """Bytes of a real rank."""

    at_rest: int
    peak: int


def measure_memory(world: World, run: Run) -> Taken:
    """Run the steps of a simulation with real data."""
    with Storages() as seen:
        _, strategy, feed = build_with_feed(run, world)
        usual, longest = feed.make(middle(feed)), feed.longest()
        for _ in range(2):
            strategy.train_step(usual, 1e-3)
            time.sleep(0.3)  # gloo's threads free their tensors
            gc.collect()
        at_rest = seen.alive
        seen.restart()
        strategy.train_step(longest, 1e-3)
    strategy.close()
    return Taken(at_rest, seen.peak.bytes)


def planned(world: World, run: Run, ranks: int, rank: int) -> Simulated:
    return simulate(run, ranks, rank, on_gpus=False)


def simulated(**changed: object) -> Simulated:
    """Simulate one rank of four, on two machines."""
    told: dict = {
        "rank": 0,
        "at_rest": {"weights": 4},
        "peak": 10,
        "kinds": {"weights": 10},
        "where": "backward",
        "ops": [],
        "sent": [],
        "micro_batches": 2,
        "tokens": 8.0,
        "parameters": 1,
        "trained": 1,
    }
    return Simulated(**(told | changed))
