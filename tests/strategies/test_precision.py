"""fp16: the loss scale, steps that overflow, and the same bits under every exact strategy."""

from __future__ import annotations

import itertools
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.run import Run
from lockstep.distributed.world import World
from lockstep.strategies.exact import precision
from lockstep.strategies.exact.precision import FIRST_SCALE, HIGHEST_SCALE, LOWEST_SCALE, SCALE_INTERVAL, LossScale
from lockstep.strategies.strategy import NotFinite
from lockstep.training.data_loader import StepLoader
from lockstep.training.resolve import resolve_strategy
from support import checkpoints
from support.command import lines, train, write
from support.harness import build, build_with_feed, digest, rank_0_of, run_on, tiny
from support.marks import needs
from support.messages import raises
from support.misbehaving import planted
from support.places import TESTS_PATH
from support.strategy_runs import EXACT, worlds

FINE, INF = torch.tensor(1.0), torch.tensor(float("inf"))
LOSSES = torch.ones(8, dtype=torch.float64)


def test_the_loss_scale_follows_torchs_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = torch.amp.GradScaler("cpu")
    assert (theirs.get_scale(), theirs.get_growth_interval()) == (FIRST_SCALE, SCALE_INTERVAL)
    monkeypatch.setattr(precision, "SCALE_INTERVAL", 5)
    theirs.set_growth_interval(5)
    scale = LossScale(torch.device("cpu"))
    weight = torch.nn.Parameter(torch.ones(()))
    other = torch.optim.SGD([weight], lr=0.0)
    for step in range(22):
        norm = INF if step in (3, 4, 9) else FINE
        scale.follow(LOSSES, norm)
        weight.grad = norm.clone()
        theirs.scale(torch.zeros(()))  # creates the scaler's scale on the first call
        theirs.step(other)
        theirs.update()
        assert bool(scale.overflowed) == bool(torch.isinf(norm))
        assert float(scale.value) == theirs.get_scale(), step
    assert float(scale.value) == FIRST_SCALE / 2  # halved three times and doubled twice


def test_the_loss_scale_is_bounded_and_ignores_nonfinite_losses() -> None:
    scale = LossScale(torch.device("cpu"))
    for _ in range(20):
        scale.follow(LOSSES, INF)
    assert float(scale.value) == LOWEST_SCALE
    assert not scale.overflowed  # the loss, not the scale, caused it
    scale.value = torch.tensor(HIGHEST_SCALE)
    scale.good_steps = torch.tensor(float(SCALE_INTERVAL - 1))
    scale.follow(LOSSES * float("nan"), INF)
    assert (float(scale.value), float(scale.good_steps), bool(scale.overflowed)) == (
        HIGHEST_SCALE,
        SCALE_INTERVAL - 1,
        False,
    )
    scale.follow(LOSSES, FINE)
    assert float(scale.value) == HIGHEST_SCALE


def steps_of(world: World, run: Run, overflows: dict[int, float], steps: int = 6) -> dict[str, Any]:
    """Return the results, equal on all ranks, of a few steps, some of which overflow."""
    _, strategy, feed = build_with_feed(run, world)
    strategy.dry_run(feed.longest())
    planted(strategy, overflows)
    assert strategy.precision.loss_scale is not None
    results, scales, weights = [], [], []
    for t in range(steps):
        results.append(strategy.train_step(feed.make(t), 1e-3))
        scales.append(float(strategy.precision.loss_scale.value))
        if world.size == 1:  # with several ranks, the final state shows it
            weights.append(digest({k: v for k, v in strategy.state.state_dict().items() if k.startswith("model.")}))
    state = strategy.state.state_dict()
    assert float(state["scaling.scale"]) == scales[-1]
    found = {
        "digest": digest(state) if world.is_main else "",  # `state_dict` is collective
        "loss": [float(r.loss) for r in results],
        "norm": [str(float(r.grad_norm)) for r in results],  # as text, because nan is not equal to itself
        "used": [bool(r.used) for r in results],
        "scales": scales,
        "moved": [a != b for a, b in itertools.pairwise(weights)],
    }
    strategy.close()
    return found


OVERFLOWS = {2: 1e4, 3: 1e4}


@cache
def of(name: str, ranks: int, *overrides: str) -> dict[str, Any]:
    stages = ("strategy.options.stages=2",) if name == "pipeline" else ()
    run = tiny(f"strategy.name={name}", "precision=fp16", *stages, *overrides)
    return rank_0_of(ranks, steps_of, run, OVERFLOWS, alike=("used", "scales"), timeout_s=40)


@pytest.mark.processes
def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    found = of("single", 1)
    assert found["used"] == [True, True, False, False, True, True]
    assert found["scales"] == [
        FIRST_SCALE,
        FIRST_SCALE,
        FIRST_SCALE / 2,
        FIRST_SCALE / 4,
        FIRST_SCALE / 4,
        FIRST_SCALE / 4,
    ]
    assert found["moved"] == [True, False, False, True, True]
    assert all(loss < 100 for i, loss in enumerate(found["loss"]) if i not in OVERFLOWS)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "ranks"), [(n, r) for n in EXACT if not n.startswith("zero") for r in worlds(n) if r in (2, 3)]
)
def test_the_same_bits_and_the_same_skipped_steps(name: str, ranks: int) -> None:
    assert {**of(name, ranks), "moved": 0} == {**of("single", 1), "moved": 0}


@pytest.mark.processes
def test_gathering_per_micro_batch_gives_the_same_bits() -> None:
    found = of("fsdp2", 2, "strategy.options.gather=micro_batch")
    assert {**found, "moved": 0} == {**of("single", 1), "moved": 0}


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_a_killed_job_resumes_with_its_scale_and_reports_overflows(tmp_path: Path, cache: Path) -> None:
    ends = []
    for name in ("straight", "killed"):
        write(folder := tmp_path / name)
        if name == "straight":
            (folder / "go").touch()
        options = ["strategy.name=support.misbehaving.Overflowing", "precision=fp16", "checkpoint.every=4", "steps=12"]
        status, out, err = train(folder, cache, *options, "launch.processes=2", PYTHONPATH=TESTS_PATH)
        if name == "killed":
            assert status != 0
            status, more, err = train(folder, cache, *options, "launch.processes=1", PYTHONPATH=TESTS_PATH)
            assert "resuming after step " in more  # 4 or 8: both follow an overflow
            out += more
        assert status == 0, err
        assert "1 step skipped: fp16 overflowed; the loss scale is 32,768 now" in out
        told = [line for line in lines(folder) if line["split"] == "train"]
        assert told[-1]["loss_scale"] == FIRST_SCALE / 4
        assert all("skipped_steps" not in line for line in told)
        ends.append(checkpoints.digest(folder / "out/checkpoints/step-000012"))
    assert ends[0] == ends[1]


def switched(world: World, run: Run) -> list[tuple[float, str]]:
    """Return (loss scale after an overflow, digest two steps later), for going on directly and for another strategy
    that loads the state."""
    task, first = build(run, world)
    feed = StepLoader(task, first.own_micro_batches(), world.device)
    planted(first, OVERFLOWS)
    for t in range(4):
        first.train_step(feed.make(t), 1e-3)
    kept = world.broadcast({k: v.clone() for k, v in first.state.state_dict().items()})
    _, second = build(run.model_copy(update={"strategy": run.strategy.model_copy(update={"name": "fsdp2"})}), world)
    second.state.load_state_dict(kept)
    ends = []
    for strategy in (first, second):
        scale = float(strategy.state.state_dict()["scaling.scale"])
        mine = StepLoader(task, strategy.own_micro_batches(), world.device)
        for t in (4, 5):
            strategy.train_step(mine.make(t), 1e-3)
        state = strategy.state.state_dict()
        ends.append((scale, digest(state) if world.is_main else ""))
        strategy.close()
    return ends


@pytest.mark.processes
def test_another_strategy_resumes_with_the_scale() -> None:
    run = tiny("strategy.name=allreduce", "precision=fp16")
    for straight, again in run_on(2, switched, run):
        assert straight == again
        assert straight[0] == FIRST_SCALE / 4


def bad_loss(world: World, run: Run) -> tuple[str, list[float]]:
    """Return the error message of a non-finite loss, and the loss scale before and after it."""
    _, strategy, feed = build_with_feed(run, world)
    planted(strategy, {}, infinite=1)
    scales, said = [], "skipped"
    for t in range(2):
        try:
            result = strategy.train_step(feed.make(t), 1e-3)
            assert bool(result.used) == (t == 0)
        except NotFinite as caught:
            said = str(caught)
        assert strategy.precision.loss_scale is not None
        scales.append(float(strategy.precision.loss_scale.value))
    strategy.close()
    return said, scales


@pytest.mark.processes
@pytest.mark.parametrize(("what", "wanted"), [("stop", "step 1: micro-batches [0, 1, 2, 3"), ("skip", "skipped")])
def test_a_nonfinite_loss_is_handled_as_in_fp32(what: str, wanted: str) -> None:
    run = tiny("strategy.name=single", "precision=fp16", f"on_nonfinite={what}")
    said, scales = run_on(1, bad_loss, run)[0]
    assert said.startswith(wanted)
    assert scales == [FIRST_SCALE, FIRST_SCALE]


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_deepspeed_is_refused(name: str) -> None:
    needs("deepspeed")
    with raises("LS4143"):
        resolve_strategy(tiny(f"strategy.name={name}", "precision=fp16"), 2)
