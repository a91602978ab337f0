"""Steps under each strategy, by forked ranks."""

from __future__ import annotations

from typing import Any

from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.config.schedules import learning_rate
from lockstep.distributed.world import World
from support.harness import build_with_feed, digest

NAMES = plugins.names("strategies")  # pipeline is skipped with an older torch: conftest.py
EXACT = [name for name in NAMES if plugins.find("strategies", name).exact]


def steps_of(world: World, run: Run, steps: int = 6) -> dict[str, Any]:
    """Train a few steps; returns what must be equal everywhere."""
    _, strategy, feed = build_with_feed(run, world)
    rates = [learning_rate(run.optim, t, steps) for t in range(steps)]
    results = [strategy.train_step(feed.make(t).to(world.device), rate) for t, rate in enumerate(rates)]
    parameters, state = list(strategy.model.parameters()), strategy.state.state_dict()
    found = {
        "digest": digest(state),
        "loss": [float(r.loss) for r in results],
        "norm": [float(r.grad_norm) for r in results],
        "weights": {k: v.clone() for k, v in state.items() if k.startswith("model.")},
        "remarks": list(strategy.remarks),
        "clear": all(p.grad is None for p in parameters),
        "dtypes": {str(v.dtype) for k, v in state.items() if "exp_avg" in k or k.startswith("model.transformer.h")},
    }
    strategy.close()
    return found


def worlds(name: str) -> list[int]:
    """Numbers of processes on which a strategy is tried; a pipeline's model has two layers, for two stages."""
    return {"single": [1], "pipeline": [2, 4]}.get(name, [1, 2, 3, 4])
