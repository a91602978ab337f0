"""Every schedule against transformers' or torch's own, and how it is drawn."""

import math
from typing import Any

import pytest
import torch
from harness import TINY
from transformers import get_scheduler

from lockstep.config.optim import NAMES, OptimSection
from lockstep.config.run import RunError, load
from lockstep.config.schedules import BLOCKS, drawn, learning_rate, planned

STEPS = 50


def rates(steps: int = STEPS, **keys: Any) -> list[float]:
    section = OptimSection(**({"learning_rate": 3e-4} | keys))
    return [learning_rate(section, step, steps) for step in range(steps)]


def theirs(scheduler: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for _ in range(STEPS):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)


@pytest.mark.parametrize(
    ("ours", "name", "options"),
    [
        ({"schedule": "constant"}, "constant_with_warmup", {}),
        ({"schedule": "linear"}, "linear", {}),
        ({"schedule": "cosine"}, "cosine", {}),
        ({"schedule": "cosine", "minimum": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ({"schedule": "inverse_sqrt"}, "inverse_sqrt", {}),
        ({"schedule": "polynomial", "power": 2.0, "minimum": 0.1}, "polynomial", {"power": 2.0, "lr_end": 3e-5}),
        ({"schedule": "polynomial", "minimum": 0.1}, "polynomial", {"lr_end": 3e-5}),
        *(
            (
                {"schedule": "wsd", "decay_steps": 20, "decay_shape": shape},
                "warmup_stable_decay",
                {"num_decay_steps": 20, "decay_type": {"sqrt": "1-sqrt"}.get(shape, shape)},
            )
            for shape in ("linear", "cosine", "sqrt")
        ),
    ],
)
@pytest.mark.parametrize("warmup", [0, 7])
def test_rates_are_those_of_transformers(ours: dict, name: str, options: dict, warmup: int) -> None:
    known = optimizer()
    scheduler = get_scheduler(name, known, warmup, STEPS, options)
    assert rates(**ours, warmup_steps=warmup) == pytest.approx(theirs(scheduler, known), abs=1e-12)


@pytest.mark.parametrize(("warmup", "share"), [(0, 0.3), (10, 0.2)])
def test_one_cycle_is_torch_s(warmup: int, share: float) -> None:
    known = optimizer()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        known, 3e-4, total_steps=STEPS, pct_start=share, cycle_momentum=False, final_div_factor=40
    )
    found = []
    for step in range(STEPS):
        found.append(scheduler.get_last_lr()[0])
        known.step()
        if step < STEPS - 1:
            scheduler.step()
    assert rates(schedule="one_cycle", warmup_steps=warmup, minimum=1e-3) == pytest.approx(found, abs=1e-12)


def test_points_have_straight_lines_between_them() -> None:
    points = [[0, 0.0], [10, 1e-3], [20, 1e-3], [40, 2e-4]]
    found = rates(schedule=points, learning_rate=1e-3)
    assert found[:3] == pytest.approx([0.0, 1e-4, 2e-4])
    assert found[10:21] == pytest.approx([1e-3] * 11)
    assert found[30] == pytest.approx(6e-4)
    assert found[40:] == [2e-4] * 10
    assert load(None, [f"optim.schedule={points}"], TINY | {"optim": {}}).optim.learning_rate == 1e-3


def test_warmup_as_a_fraction() -> None:
    assert rates(100, warmup_steps=10) == rates(100, warmup_fraction=0.1)


def test_wsd_falls_in_the_last_tenth_and_never_into_the_warmup() -> None:
    found = rates(100, schedule="wsd", warmup_steps=10)
    assert found[10:91] == [3e-4] * 81
    assert found[95] == pytest.approx(1.5e-4)
    assert rates(20, schedule="wsd", warmup_steps=15, decay_fraction=1.0)[:16] == rates(20, warmup_steps=15)[:16]


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_few_steps_are_no_trouble(schedule: str, steps: int) -> None:
    for warmup in (0, 1, 5):
        found = rates(steps, schedule=schedule, warmup_steps=warmup)
        assert all(0 <= rate <= 3e-4 for rate in found)
        assert drawn(OptimSection(schedule=schedule, warmup_steps=warmup), steps)


def test_it_is_drawn_in_blocks() -> None:
    line = drawn(OptimSection(learning_rate=1e-3, schedule="wsd", warmup_steps=200), 1000, width=10)
    assert line == "▁▅███████▁ wsd: 0 at first, 0.001 at step 200, 1e-05 at the last"
    assert set(line[:10]) <= set(BLOCKS)
    long = planned(OptimSection(warmup_steps=777), 10**9, 50)
    assert len(long) < 60
    assert max(long, key=lambda point: point[1])[0] == 777
    assert not math.isnan(long[-1][1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.schedule=coss"], "'coss' will not do: wanted is one of constant, linear, cosine, inverse_sqrt"),
        (["optim.schedule=cosine_with_min_lr"], "it is cosine here, with optim.minimum (a share of learning_rate)"),
        (["optim.schedule=reduce_lr_on_plateau"], "would differ between a run and its resume"),
        (["optim.schedule=[[1, 2]]"], "wanted are points [[step, rate], ...] in the order of their steps"),
        (["optim.schedule=[[0, 1], [0, 2]]"], "wanted are points [[step, rate], ...] in the order of their steps"),
        (["optim.schedule=[[0, .nan]]"], "rates are finite and not negative"),
        (["optim.schedule=[[0, 1e-4], [9, -1]]"], "rates are finite and not negative"),
        (["optim.schedule=[]"], "wanted are points"),
        (["optim.schedule=[[0, 1e-4]]"], "and the highest of the points in schedule 0.0001: leave learning_rate out"),
        (["optim.minimum=0.1", "optim.schedule=constant"], "minimum has no meaning with schedule: constant"),
        (["optim.power=2"], "power has no meaning with schedule: linear"),
        (["optim.decay_steps=5"], "decay_steps has no meaning with schedule: linear"),
        (["optim.warmup_fraction=0.1"], "give warmup_steps or warmup_fraction, and not both"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(RunError) as caught:
        load(None, words, TINY)  # it has a rate and a warm-up
    assert said in str(caught.value)


def test_names_of_transformers_that_mean_the_same_are_taken() -> None:
    for theirs_, ours in (("constant_with_warmup", "constant"), ("warmup_stable_decay", "wsd")):
        assert load(None, [f"optim.schedule={theirs_}"], TINY).optim.schedule == ours
