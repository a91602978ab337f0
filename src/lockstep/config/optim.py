"""The section `optim` of the run file: optimizer, parameter groups and learning rate schedule.

In: a mapping read from YAML, and the number of steps. Out: a frozen value, the rate of each step, and a one-line plot
for a terminal. Each optimizer's plug-in (`strategies/optimizers/`) types its additional keys. Imports no torch:
`lockstep plan` and the report plot the schedule, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from lockstep.config.errors import InvalidValue
from lockstep.config.sections import PluginSection, Section, Steps

NAMES = ("constant", "linear", "cosine", "inverse_sqrt", "polynomial", "wsd", "one_cycle")
# transformers' name of a schedule -> ours, where they differ.
SCHEDULES = {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}
_ADVICE = {
    "cosine_with_min_lr": "it is cosine here, with optim.min_lr_ratio (a share of learning_rate) for its min_lr_rate",
    "cosine_warmup_with_min_lr": "it is cosine here, with optim.min_lr_ratio (a share of learning_rate) for its "
    "min_lr_rate, and its rates come a step earlier than these",
    "cosine_with_restarts": "restarts can be written as points: [[step, rate], ...]",
    "reduce_lr_on_plateau": "a rate that follows the scores would differ between a run and its resume",
}
_ENDING = ("linear", "cosine", "polynomial", "wsd", "one_cycle")  # schedules that end at `min_lr_ratio`
# Optimizer -> its default schedule, if not linear.
_USUAL = {"schedule_free": "constant"}
# Optimizers whose warm-up starts at 1 / warmup_steps and reaches the full rate in its last step, as in their libraries.
_FROM_ONE = ("schedule_free",)


def _schedule(value: Any) -> Any:
    if not isinstance(value, list):
        if str(value) in _ADVICE:
            raise InvalidValue("LS1070", f"invalid value {value!r}; {_ADVICE[str(value)]}")
        if (value := SCHEDULES.get(str(value), value)) not in NAMES:
            raise InvalidValue(
                "LS1071", f"invalid value {value!r}; expected one of {', '.join(NAMES)}, or points [[step, rate], ...]"
            )
        return value
    expected = "expected points [[step, rate], ...] in the order of their steps, the first of them 0"
    try:
        points = [(int(step), float(rate)) for step, rate in value if step == int(step)]
    except (TypeError, ValueError, OverflowError):
        raise InvalidValue("LS1072", f"invalid value {value!r}; {expected}") from None
    steps = [step for step, _ in points]
    if len(points) < len(value) or not points or steps[0] != 0 or steps != sorted(set(steps)):
        raise InvalidValue("LS1073", f"invalid value {value!r}; {expected}")
    if not all(0 <= rate < math.inf for _, rate in points) or not any(rate for _, rate in points):
        raise InvalidValue(
            "LS1074", f"invalid value {value!r}; every rate must be finite and >= 0, and at least one must be > 0"
        )
    return points


class Group(Section):
    """Parameter group: weights with their own learning rate or weight decay."""

    match: str = Field(min_length=1, description="their names, with * for any part of a name")
    learning_rate: float | None = Field(None, gt=0, description="their highest rate")
    weight_decay: float | None = Field(None, ge=0, description="theirs; biases and norms have none all the same")


def _groups(value: Any) -> Any:
    """Validate `optim.groups`. Errors: `ValueError`, which names the group and its key."""
    if not isinstance(value, list):
        raise InvalidValue(
            "LS1075", "expected a list of groups, such as [{match: 'classifier.*', learning_rate: 1e-3}]"
        )
    for place, each in enumerate(value):
        try:
            Group.model_validate(each)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0]) if first["loc"] else ""
            expectation = first["msg"].removeprefix("Input should be ")
            wrong = {
                "extra_forbidden": f"unknown key {key!r}; known are {', '.join(Group.model_fields)}",
                "missing": f"{key} is missing: the names of its weights, with * for any part of a name",
            }.get(first["type"], f"{f'{key}: ' if key else ''}invalid value {first['input']!r}; must be {expectation}")
            raise InvalidValue("LS1076", f"group {place + 1}: {wrong}") from None
    return value


class OptimSection(PluginSection):
    name: str = Field(
        "adamw",
        description="adamw | sgd | lion | adafactor | muon | schedule_free | adamw_8bit, or your.module.Class; its "
        "other keys are the optimizer's",
    )
    learning_rate: float = Field(5e-5, gt=0, description="the highest rate of the schedule")
    schedule: Annotated[str | list[tuple[Steps, float]], BeforeValidator(_schedule)] = Field(
        "linear",
        description="constant | linear | cosine | inverse_sqrt | polynomial | wsd | one_cycle, after the warm-up, or "
        "points [[step, rate], ...] with straight lines between them; of schedule_free constant by default",
    )
    warmup_steps: Steps = Field(
        0, description="steps of linear warm-up from 0 (wsd: from min_lr_ratio; schedule_free: from 1 / warmup_steps)"
    )
    warmup_fraction: float = Field(0.0, ge=0, le=1, description="the same as a share of all steps")
    min_lr_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="final rate of linear, cosine, polynomial, wsd and one_cycle, as a share of learning_rate",
    )
    power: float = Field(1.0, gt=0, description="exponent of polynomial")
    decay_fraction: float = Field(0.1, gt=0, le=1, description="share of all steps, the last ones, in which wsd falls")
    decay_steps: Steps = Field(0, description="the same as steps, instead of decay_fraction; 0: not given")
    decay_shape: Literal["linear", "cosine", "sqrt"] = Field(
        "linear", description="how wsd falls; sqrt: 1 - the root of the share that is done"
    )
    weight_decay: float = Field(0.01, ge=0, description="not applied to biases (also of relative positions) and norms")
    groups: Annotated[list[Group], BeforeValidator(_groups)] = Field(
        default_factory=list,
        description="weights with a rate or a decay of their own, as {match, learning_rate, weight_decay}; the first "
        "that matches holds",
    )
    layerwise_lr_decay: float = Field(
        1.0, gt=0, le=1, description="factor of the rate from each layer to the one below it; 1: all the same"
    )
    master_weights: bool = Field(
        True,
        description="with model.dtype bfloat16: update a float32 copy of the weights and round it into them; false: no "
        "copy, and updates below a weight's last bit are lost",
    )
    max_grad_norm: float | None = Field(1.0, ge=0, description="largest gradient norm; 0 or null: no clipping")

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if values.get("schedule") is None:
            values["schedule"] = _USUAL.get(str(values.get("name")), "linear")
        with suppress(ValueError):  # invalid points are refused under their own key
            if isinstance(points := _schedule(values["schedule"]), list):
                values.setdefault("learning_rate", max(rate for _, rate in points))
        return values

    @model_validator(mode="after")
    def _of_its_schedule(self) -> OptimSection:
        if self.warmup_steps and self.warmup_fraction:
            raise InvalidValue("LS1077", "warmup_steps and warmup_fraction are both set; remove one of them")
        points = isinstance(self.schedule, list)
        if isinstance(self.schedule, list) and self.learning_rate != (top := max(rate for _, rate in self.schedule)):
            raise InvalidValue(
                "LS1078",
                f"learning_rate is {self.learning_rate:g} but the highest point of schedule is {top:g}; remove "
                "learning_rate",
            )
        wrong = {
            "warmup_steps": points and self.warmup_steps,
            "warmup_fraction": points and self.warmup_fraction,
            "min_lr_ratio": self.schedule not in _ENDING and self.min_lr_ratio,
            "power": self.schedule != "polynomial" and self.power != 1.0,
            "decay_steps": self.schedule != "wsd" and self.decay_steps,
            "decay_fraction": self.schedule != "wsd" and self.decay_fraction != 0.1,
            "decay_shape": self.schedule != "wsd" and self.decay_shape != "linear",
        }
        for key, reason in wrong.items():
            if reason:
                name = "points" if points else self.schedule
                raise InvalidValue("LS1079", f"{key} has no effect with schedule: {name}; remove it")
        return self


BLOCKS = "▁▂▃▄▅▆▇█"
LOOKED_AT = 10_000  # most steps sampled for the plot
_ONE_CYCLE = (0.3, 1 / 25)  # torch's OneCycleLR: share of the steps with a rising rate, and initial share of the rate


def learning_rate(optim: OptimSection, step: int, steps: int) -> float:
    """Return the learning rate of update number `step` (from 0) of `steps`.

    Linear warm-up reaches the full rate in the update after the last warm-up step (`schedule_free`: in the last warm-up
    step, as in its library). After warm-up, the schedules equal those of the same name in transformers: linear and
    half-cosine (Loshchilov and Hutter, "SGDR", ICLR 2017) decay to `min_lr_ratio`, polynomial, inverse square root
    (Vaswani et al., "Attention is all you need", 2017) and wsd (Hu et al., "MiniCPM", 2024; its `sqrt` shape: Hägele et
    al., 2024), which also warms up from `min_lr_ratio`. `one_cycle` is torch's OneCycleLR (Smith and Topin, 2018)
    without its momentum schedule; its maximum may lie between two steps.
    """
    if isinstance(optim.schedule, list):
        return _on_lines(optim.schedule, step)
    warmup = optim.warmup_steps or math.ceil(optim.warmup_fraction * steps)
    if optim.schedule == "one_cycle":
        return optim.learning_rate * _one_cycle(optim, step, steps)
    if step < warmup and optim.schedule == "wsd" and optim.min_lr_ratio:
        return optim.learning_rate * (step / warmup * (1.0 - optim.min_lr_ratio) + optim.min_lr_ratio)
    if step < warmup:
        return optim.learning_rate * (step + (optim.name in _FROM_ONE)) / warmup
    return optim.learning_rate * _share(optim, step, steps, warmup)


def _share(optim: OptimSection, step: int, steps: int, warmup: int) -> float:
    """Return the learning rate after warm-up, as a share of the highest one."""
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "inverse_sqrt":
        scale = warmup or 10_000
        return 1.0 / math.sqrt((step + scale - warmup) / scale)
    if optim.schedule == "wsd":
        decay = optim.decay_steps or math.ceil(optim.decay_fraction * steps)
        begin = max(warmup, steps - decay)
        if step < begin:
            return 1.0
        return _falling(optim.decay_shape, (step - begin) / max(1, steps - begin), 1.0, optim.min_lr_ratio)
    progress = (step - warmup) / max(1, steps - warmup)
    return _falling(str(optim.schedule), progress, optim.power, optim.min_lr_ratio)


def _falling(shape: str, progress: float, power: float, minimum: float) -> float:
    """Return the factor of a decay from 1 to `minimum` as `progress` goes from 0 to 1."""
    if shape == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif shape == "sqrt":
        left = 1.0 - math.sqrt(min(1.0, progress))
    else:
        left = max(0.0, 1.0 - progress)
        left = left if power == 1.0 else left**power
    return max(0.0, left) * (1.0 - minimum) + minimum


def _one_cycle(optim: OptimSection, step: int, steps: int) -> float:
    """Return the share of the rate: half a cosine up, then half a cosine down. A run of one step has the full rate."""
    share, begin = _ONE_CYCLE
    if steps == 1:
        return 1.0
    top = (optim.warmup_steps or (optim.warmup_fraction or share) * steps) - 1
    if step < top:
        return 1.0 - _falling("cosine", step / top, 1.0, 0.0) * (1.0 - begin)
    down = steps - 1 - top
    return _falling("cosine", min(1.0, (step - top) / down) if down > 0 else 0.0, 1.0, optim.min_lr_ratio)


def _on_lines(points: Sequence[tuple[int, float]], step: int) -> float:
    """Interpolate linearly between points; after the last point the rate is constant."""
    for (before, low), (after, high) in pairwise(points):
        if step < after:
            return low + (high - low) * (step - before) / (after - before)
    return points[-1][1]


def drawn(optim: OptimSection, steps: int, width: int = 40) -> str:
    """Plot the rates of a run in one line of block characters, with first, highest and last rate."""
    points = planned(optim, steps, LOOKED_AT)
    rates = [rate for _, rate in points]
    columns = [rates[round(i * (len(rates) - 1) / (width - 1))] for i in range(width)]
    line = "".join(BLOCKS[min(7, int(8 * rate / (max(rates) or 1.0)))] for rate in columns)
    top, highest = max(points, key=lambda point: point[1])
    how = "points" if isinstance(optim.schedule, list) else optim.schedule
    return f"{line} {how}: {rates[0]:.3g} at first, {highest:.3g} at step {top:,}, {rates[-1]:.3g} at the last"


def planned(optim: OptimSection, steps: int, count: int) -> list[tuple[int, float]]:
    """Return (step, rate) of about `count` updates, including those where warm-up ends and all given points."""
    ends = {0, steps - 1, optim.warmup_steps, math.ceil(optim.warmup_fraction * steps)}
    ends |= {step for step, _ in optim.schedule} if isinstance(optim.schedule, list) else set()
    evenly = {round(i * (steps - 1) / max(1, count - 1)) for i in range(count)}
    return [(step, learning_rate(optim, step, steps)) for step in sorted(ends | evenly) if step < steps]
