"""Pipelines: the bits of a single process, for every family, schedule and shape of the job; and what is refused."""

from typing import Any

import pytest
from harness import build, digest, run_on, tiny

from lockstep.data.feed import Feed
from lockstep.optim import learning_rate
from lockstep.run import Run
from lockstep.world import World

FOUR = "model.config.n_layer=4"


def steps_of(world: World, run: Run, steps: int = 3) -> dict[str, Any]:
    """Train a few steps; what must be equal everywhere."""
    task, strategy = build(run, world)
    feed = Feed(run, task, strategy.leaves(), world.device)
    results = [strategy.train_step(feed.make(t), learning_rate(run.optim, t + 1, 6)) for t in range(steps)]
    state, export = strategy.state(), strategy.export()
    found = {
        "loss": [float(r.loss) for r in results],
        "norm": [float(r.grad_norm) for r in results],
        "names": list(state),
        "state": digest(state),
        "export": digest(export) if export is not None else None,
        "weights": {k: v.clone() for k, v in state.items() if k.startswith("model.")},
        "count": strategy.parameter_count,
        "held": sum(p.numel() for p in strategy.model.parameters()),
        "clear": all(p.grad is None for p in strategy.model.parameters()),
    }
    strategy.close()
    return found


def of(ranks: int, *overrides: str) -> dict[str, Any]:
    """Rank 0's findings; what every rank must agree on is checked."""
    run = tiny(*overrides)
    first, *others = run_on(ranks, steps_of, run, run=run)
    for other in others:
        assert {k: other[k] for k in ("loss", "norm", "count")} == {k: first[k] for k in ("loss", "norm", "count")}
        assert other["clear"]
        assert other["export"] is None
    assert first["held"] < first["count"] or ranks == 1
    return first


def same(pipelined: dict[str, Any], single: dict[str, Any]) -> None:
    for key in ("loss", "norm", "count", "names", "state", "export"):
        assert pipelined[key] == single[key], key


@pytest.fixture(scope="module")
def single() -> dict[str, dict[str, Any]]:
    return {p: of(1, "strategy.name=single", FOUR, f"precision={p}") for p in ("fp32", "bf16")}


SHAPES = {
    "2 stages": (2, ()),
    "3 stages": (3, ()),
    "4 stages, gpipe": (4, ("schedule=gpipe",)),
    "2 stages, interleaved": (2, ("schedule=interleaved",)),
    "2 x 2": (4, ("stages=2",)),
    "2 x 2, interleaved": (4, ("stages=2", "schedule=interleaved", "stages_per_rank=2")),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pipeline_has_the_bits_of_one_process(shape: str, precision: str, single: dict) -> None:
    ranks, options = SHAPES[shape]
    options = tuple(f"strategy.options.{o}" for o in options)
    same(of(ranks, "strategy.name=pipeline", FOUR, f"precision={precision}", *options), single[precision])
