"""Strategies report each micro-batch's gradients to an observer: the bits are those of one process."""

from __future__ import annotations

from functools import cache

import pytest
from torch import Tensor

from lockstep.config.run import Run
from lockstep.distributed.tensor_hashes import hash_text
from lockstep.distributed.world import World
from lockstep.strategies.observer import StepObserver, WholeGradient, listening
from support.harness import build_with_feed, run_on, tiny
from support.marks import needs

Heard = dict[tuple[int, str], str]  # micro-batch and parameter -> the hash of its gradient

LAYERS = "model.config.n_layer=4"
WAYS = {
    "allreduce": (2, ()),
    "ddp": (2, ()),
    "hf_trainer": (2, ()),
    "fsdp2": (2, ("strategy.options.gather=step",)),
    "zero1": (2, ()),
    "zero3": (2, ()),
    "pipeline": (2, ()),
    "pipeline, two side by side": (4, ("strategy.options.stages=2",)),
    "pipeline, interleaved": (2, ("strategy.options.schedule=interleaved", "strategy.options.stages_per_rank=2")),
}


class Listener(StepObserver):
    """Hash the gradients that are reported."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.gradients: Heard = {}
        self.reductions = 0

    def hears(self, index: int) -> bool:
        return True

    def loss(self, index: int, loss: Tensor) -> None:
        self.losses[index] = float(loss.detach())

    def gradient(self, index: int, name: str, gradient: Tensor) -> None:
        assert (index, name) not in self.gradients
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        self.gradients[index, name] = hash_text(dense + 0.0)  # so that -0.0 becomes 0.0

    def reduced(self, gradient: WholeGradient) -> None:
        self.reductions += 1


def heard(world: World, run: Run) -> tuple[dict[int, float], Heard, int]:
    _, strategy, feed = build_with_feed(run, world)
    listener = Listener()
    with listening(strategy, listener):
        strategy.train_step(feed.make(0), 1e-3)
    strategy.train_step(feed.make(1), 1e-3)  # the observer is gone
    strategy.close()
    return listener.losses, listener.gradients, listener.reductions


@cache
def one_process() -> tuple[dict[int, float], Heard]:
    run = tiny("strategy.name=single", LAYERS)
    losses, gradients, reductions = heard(World(run), run)
    assert reductions == 1
    return losses, gradients


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_observers_see_each_micro_batch_once_with_the_bits_of_one_process(way: str) -> None:
    if way.startswith("zero"):
        needs("deepspeed")
    ranks, options = WAYS[way]
    run = tiny(f"strategy.name={way.partition(',')[0]}", LAYERS, *options)
    losses: dict[int, float] = {}
    gradients: Heard = {}
    for mine, theirs, reductions in run_on(ranks, heard, run):
        assert reductions == 1
        assert not gradients.keys() & theirs.keys()  # one rank reports each gradient
        losses |= mine
        gradients |= theirs
    assert (losses, gradients) == one_process()


def test_the_control_another_seed_has_other_gradients() -> None:
    run = tiny("strategy.name=single", LAYERS, "seed=1")
    _, gradients, _ = heard(World(run), run)
    assert gradients.keys() == one_process()[1].keys()
    assert not set(gradients.values()) & set(one_process()[1].values())
