"""Every schedule matches transformers' or torch's own, and is plotted correctly."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from lockstep.config.run import RunError, load
from lockstep.config.schedules import BLOCKS, NAMES, drawn, learning_rate, planned
from lockstep.config.sections import OptimSection
from support.harness import TINY

STEPS = 50


def rates(steps: int = STEPS, **keys: Any) -> list[float]:
    section = OptimSection(**({"learning_rate": 3e-4} | keys))
    return [learning_rate(section, step, steps) for step in range(steps)]


def theirs(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = [scheduler.get_last_lr()[0]]
    optimizer.step()  # once: torch warns of a scheduler that steps first
    for _ in range(steps - 1):
        scheduler.step()
        found.append(scheduler.get_last_lr()[0])
    return found


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)


def named_there(steps: int, warmup: int, minimum: float) -> Iterator[tuple[dict, str, dict]]:
    """Yield our schedules with transformers' name and options for the same one, if it exists."""
    ends, least = {"min_lr_ratio": minimum}, minimum * 3e-4
    yield {"schedule": "linear"} | ends, *(("polynomial", {"lr_end": least}) if minimum else ("linear", {}))
    yield (
        {"schedule": "cosine"} | ends,
        *(("cosine_with_min_lr", {"min_lr_rate": minimum}) if minimum else ("cosine", {})),
    )
    for power in (0.5, 1.0, 2.0):
        yield {"schedule": "polynomial", "power": power} | ends, "polynomial", {"power": power, "lr_end": least}
    for decay in {1, 5, steps // 2, steps - warmup} & set(range(1, steps - warmup + 1)):
        for shape in ("linear", "cosine", "sqrt"):
            keys = {"schedule": "wsd", "decay_steps": decay, "decay_shape": shape} | ends
            how = {"num_decay_steps": decay, "decay_type": {"sqrt": "1-sqrt"}.get(shape, shape)}
            yield keys, "warmup_stable_decay", how | {"min_lr_ratio": minimum}
    if not minimum:
        yield {"schedule": "constant"}, "constant_with_warmup", {}
        yield {"schedule": "inverse_sqrt"}, "inverse_sqrt", {}


@pytest.mark.parametrize("minimum", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("steps", [2, 3, 10, 33, 64, 100, 187])
def test_rates_match_transformers(steps: int, minimum: float) -> None:
    for warmup in {0, 1, 7, int(0.3 * steps), steps - 1} & set(range(steps)):
        for ours, name, options in named_there(steps, warmup, minimum):
            known = optimizer()
            scheduler = get_scheduler(name, known, warmup, steps, options)
            found = rates(steps, **ours, warmup_steps=warmup)
            assert found == pytest.approx(theirs(scheduler, known, steps), abs=1e-12), (ours, warmup)


@pytest.mark.parametrize("minimum", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("steps", [2, 3, 4, 10, 50, 64, 99, 187])
def test_one_cycle_matches_torch(steps: int, minimum: float) -> None:
    """torch's `pct_start` (0.3) is `warmup_fraction`, or the share of `warmup_steps`; its `final_div_factor` divides
    the initial rate, which is a 25th of the maximum."""
    given: list[tuple[dict, float]] = [({}, 0.3), ({"warmup_fraction": 0.05}, 0.05), ({"warmup_fraction": 0.77}, 0.77)]
    given += [({"warmup_steps": warmup}, warmup / steps) for warmup in (2, 7, steps) if 1 < warmup <= steps]
    for keys, share in given:
        known = optimizer()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            known,
            3e-4,
            total_steps=steps,
            pct_start=share,
            cycle_momentum=False,
            final_div_factor=1 / 25 / (minimum or 1e-30),
        )
        found = rates(steps, schedule="one_cycle", min_lr_ratio=minimum, **keys)
        assert found == pytest.approx(theirs(scheduler, known, steps), abs=1e-12), keys


def test_points_are_interpolated_linearly() -> None:
    points = [[0, 0.0], [10, 1e-3], [20, 1e-3], [40, 2e-4]]
    found = rates(schedule=points, learning_rate=1e-3)
    assert found[:3] == pytest.approx([0.0, 1e-4, 2e-4])
    assert found[10:21] == pytest.approx([1e-3] * 11)
    assert found[30] == pytest.approx(6e-4)
    assert found[40:] == [2e-4] * 10
    assert load(None, [f"optim.schedule={points}"], TINY | {"optim": {}}).optim.learning_rate == 1e-3


def test_warmup_as_a_fraction() -> None:
    assert rates(100, warmup_steps=10) == rates(100, warmup_fraction=0.1)


def test_the_warm_up_of_schedule_free_begins_with_one_part() -> None:
    keys = {"name": "schedule_free", "schedule": "constant"}
    assert rates(7, **keys, warmup_steps=4) == [3e-4 * part / 4 for part in (1, 2, 3, 4, 4, 4, 4)]
    assert rates(8, **keys, warmup_fraction=0.5) == rates(8, **keys, warmup_steps=4)
    assert rates(3, **keys, warmup_steps=1) == rates(3, **keys) == [3e-4] * 3
    assert rates(7, schedule="constant", warmup_steps=4) == [3e-4 * part / 4 for part in (0, 1, 2, 3, 4, 4, 4)]


def test_wsd_falls_in_the_last_tenth_and_never_into_the_warmup() -> None:
    found = rates(100, schedule="wsd", warmup_steps=10)
    assert found[10:91] == [3e-4] * 81
    assert found[95] == pytest.approx(1.5e-4)
    assert rates(20, schedule="wsd", warmup_steps=15, decay_fraction=1.0)[:16] == rates(20, warmup_steps=15)[:16]


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_schedules_of_few_steps(schedule: str, steps: int) -> None:
    for warmup in (0, 1, 5):
        found = rates(steps, schedule=schedule, warmup_steps=warmup)
        assert all(0 <= rate <= 3e-4 for rate in found)
        assert drawn(OptimSection(schedule=schedule, warmup_steps=warmup), steps)


def test_the_schedule_is_drawn_in_block_characters() -> None:
    line = drawn(OptimSection(learning_rate=1e-3, schedule="wsd", warmup_steps=200), 1000, width=10)
    assert line == "▁▅███████▁ wsd: 0 at first, 0.001 at step 200, 1e-05 at the last"
    once = {
        "0 at first, 0.001 from step 5 on": {"schedule": "constant", "warmup_steps": 5},
        "0.001 at first and at the last, 0.0005 at step 5": {"schedule": [(0, 1e-3), (5, 5e-4), (8, 1e-3)]},
    }
    for text, values in once.items():
        assert drawn(OptimSection(learning_rate=1e-3, **values), 10).endswith(f": {text}")
    assert set(line[:10]) <= set(BLOCKS)
    assert drawn(OptimSection(schedule="constant"), 9, width=3) == "███ constant: 5e-05"
    assert drawn(OptimSection(schedule="linear"), 4, width=4) == "█▇▅▃ linear: 5e-05 at first, 1.25e-05 at the last"
    long = planned(OptimSection(warmup_steps=777), 10**9, 50)
    assert len(long) < 60
    assert max(long, key=lambda point: point[1])[0] == 777
    assert not math.isnan(long[-1][1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.schedule=coss"], "invalid value 'coss'; did you mean 'cosine'? expected one of constant, linear"),
        (
            ["optim.schedule=cosine_with_min_lr"],
            "it is cosine here, with optim.min_lr_ratio (a share of learning_rate)",
        ),
        (["optim.schedule=reduce_lr_on_plateau"], "would differ after a resume"),
        (["optim.schedule=[[1, 2]]"], "expected points [[step, rate], ...] in the order of their steps"),
        (["optim.schedule=[[0, 1], [0, 2]]"], "expected points [[step, rate], ...] in the order of their steps"),
        (["optim.schedule=[[0, .nan]]"], "every rate must be finite and >= 0"),
        (["optim.schedule=[[0, 1e-4], [9, -1]]"], "every rate must be finite and >= 0"),
        (["optim.schedule=[]"], "expected points"),
        (["optim.schedule=[[0, 1e-4]]"], "but the highest point of schedule is 0.0001; remove learning_rate"),
        (["optim.min_lr_ratio=0.1", "optim.schedule=constant"], "min_lr_ratio has no effect with schedule: constant"),
        (["optim.power=2"], "power has no effect with schedule: linear"),
        (["optim.decay_steps=5"], "decay_steps has no effect with schedule: linear"),
        (["optim.warmup_fraction=0.1"], "warmup_steps and warmup_fraction are both set; remove one of them"),
    ],
)
def test_invalid_schedules_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(RunError) as caught:
        load(None, words, TINY)  # it has a rate and a warm-up
    assert said in str(caught.value)


def test_names_of_transformers_that_mean_the_same_are_taken() -> None:
    for theirs_, ours in (("constant_with_warmup", "constant"), ("warmup_stable_decay", "wsd")):
        assert load(None, [f"optim.schedule={theirs_}"], TINY).optim.schedule == ours
