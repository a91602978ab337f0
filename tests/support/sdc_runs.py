"""Runs with one wrong computation, and the findings of `sdc_check`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep.config.run import Run
from lockstep.distributed.world import World
from lockstep.training.errors import CorruptionDetected
from lockstep.training.sdc_check import SdcCheck
from support.harness import build_with_feed, digest

STEPS = 6


Fault = Callable[[Any, World, int], None]  # (strategy, rank, next step)


def guarded(world: World, run: Run, fault: Fault | None = None) -> dict[str, Any]:
    """Run steps with sdc_check; returns the findings of each, and the final digest."""
    _, strategy, feed = build_with_feed(run, world)
    session: Any = SimpleNamespace(job=strategy.job, run=run, world=world, feed=feed, strategy=strategy)
    guard, found = SdcCheck(session) if run.sdc_check.every else strategy, {}
    for step in range(STEPS):
        if fault is not None:
            fault(strategy, world, step)
        try:
            guard.train_step(feed.make(step), 1e-3)
        except CorruptionDetected as caught:
            found[step] = str(caught)
            if not caught.sound:
                break
    state = strategy.state.state_dict()
    strategy.close()
    return {"found": found, "digest": digest(state) if world.is_main else None, "retried": getattr(guard, "retried", 0)}


def flipped(tensor: Tensor, bit: int = 0) -> Tensor:
    """Flip a bit of a tensor's largest number: the lowest bit might be lost in a sum of activations."""
    changed = tensor.detach().clone().contiguous()
    place = changed.abs().view(-1).argmax()
    changed.view(-1).view(torch.int32)[place] ^= 1 << bit
    return changed


def wrong_gradient(strategy: Any, now: Callable[[], bool]) -> None:
    weight = strategy.weights.named["transformer.h.1.mlp.c_fc.weight"]
    weight.register_hook(lambda gradient: flipped(gradient) if now() else gradient)


Wrong = Callable[[Any, Callable[[], bool]], None]


class Planted:
    """Every step computes one micro-batch wrongly, on the rank that owns it."""

    def __init__(self, micro_batch: int, wrong: Wrong) -> None:
        self.micro_batch, self.wrong = micro_batch, wrong

    def __call__(self, strategy: Any, world: World, step: int) -> None:
        if step:
            return
        under_way: list[int] = []
        plain = strategy.run_micro_batch

        def run_micro_batch(micro: Any, divisor: float) -> Tensor:
            under_way.append(micro.index)
            loss = plain(micro, divisor)
            under_way.clear()
            return loss

        strategy.run_micro_batch = run_micro_batch
        self.wrong(strategy, lambda: under_way == [self.micro_batch])
