"""Count the live tensors of a rank."""

from __future__ import annotations

import time
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.config.run import Run
from lockstep.distributed.system_metrics import measured, tensor_bytes
from lockstep.distributed.world import World
from support.harness import build_with_feed

# large enough to make batches, buffers and buckets negligible
MODEL = {"type": "gpt2", "config": {"n_layer": 8, "n_head": 4, "n_embd": 128, "n_positions": 32}}


NEAR = 0.05


def settled(before: int, most: float, patience_s: float = 20) -> int:
    """Bytes of tensors after gloo's threads have freed theirs: at most `most`, or what remains when patience ends.

    A thread without CPU time frees its last tensor long after the sum is known. DeepSpeed passes gloo a view of a
    weight's gradient and then moves that gradient into the micro-batch's flat one; the view keeps the whole flat one
    alive. Nothing else runs during the wait, so the rank's own memory does not change.
    """
    until = time.monotonic() + patience_s
    while (found := tensor_bytes() - before) > most and time.monotonic() < until:
        time.sleep(0.05)
    return found


def measured_bytes(world: World, run: Run, moments: dict[str, float]) -> dict[str, int]:
    """Bytes on this rank. `moments`: expected bytes per parameter between micro-batches, at the update, and at rest. If
    given, a higher value may be freed first."""
    before = tensor_bytes()
    _, strategy, feed = build_with_feed(run, world)
    strategy.train_step(feed.make(0), 1e-3)
    own, count = sum(p.numel() for p in strategy.model.parameters()), strategy.weights.parameter_count
    between = [0]

    def now(moment: str) -> int:
        return settled(before, moments[moment] * count * (1 + NEAR)) if moment in moments else 0

    def at_update(*_: Any) -> None:
        now("update")

    batch = feed.make(1)
    hooks = [
        strategy.model.register_forward_pre_hook(lambda *_: between.append(now("between"))),
        register_optimizer_step_pre_hook(at_update),  # runs before that of `measured`
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
