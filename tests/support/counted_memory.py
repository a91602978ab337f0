"""Tensors of a rank that are alive, counted."""

from __future__ import annotations

import time
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.config.run import Run
from lockstep.distributed.system_metrics import measured, tensor_bytes
from lockstep.distributed.world import World
from support.harness import build_with_feed

# Large enough that batches, buffers and buckets are small beside it.
MODEL = {"type": "gpt2", "config": {"n_layer": 8, "n_head": 4, "n_embd": 128, "n_positions": 32}}


NEAR = 0.05


def settled(before: int, most: float, patience_s: float = 20) -> int:
    """Bytes of tensors when gloo's threads have let go: at most `most`, or what is left when patience ends.

    A thread that is not given the processor lets go of its last tensor long after the sum is known. DeepSpeed gives
    gloo a view of a weight's gradient and then moves that gradient into the micro-batch's flat one: the view's base
    keeps all of the flat one alive. While we wait here nothing else runs, so what a rank itself holds does not go away.
    """
    until = time.monotonic() + patience_s
    while (found := tensor_bytes() - before) > most and time.monotonic() < until:
        time.sleep(0.05)
    return found


def held(world: World, run: Run, moments: dict[str, float]) -> dict[str, int]:
    """Bytes on this rank; `moments`: bytes a parameter that it is to hold between micro-batches, at the update, at
    rest. Where they are told, what is more may be let go first."""
    before = tensor_bytes()
    _, strategy, feed = build_with_feed(run, world)
    strategy.train_step(feed.make(0), 1e-3)
    own, count = sum(p.numel() for p in strategy.model.parameters()), strategy.parameter_count
    between = [0]

    def now(moment: str) -> int:
        return settled(before, moments[moment] * count * (1 + NEAR)) if moment in moments else 0

    def at_update(*_: Any) -> None:
        now("update")

    batch = feed.make(1)
    hooks = [
        strategy.model.register_forward_pre_hook(lambda *_: between.append(now("between"))),
        register_optimizer_step_pre_hook(at_update),  # comes before that of `measured`
    ]
    with measured(before) as found:
        strategy.train_step(batch, 1e-3)
        now("rest")
    for hook in hooks:
        hook.remove()
    strategy.close()
    return {"update": found.at_update, "between": max(between), "rest": found.at_rest, "own": own, "all": count}


def near(bytes_held: int, formula: float) -> bool:
    return abs(bytes_held / formula - 1) <= NEAR
