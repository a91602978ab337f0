"""The section `optim` of the run file: which optimizer, at what rate, on which weights.

In: a mapping read from YAML. Out: a frozen value; the keys of an optimizer's own are typed by its plug-in
(`strategies/optimizers/`), those of the schedule are read by `schedules.py`.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from lockstep.config.sections import PluginSection, Section, Steps

NAMES = ("constant", "linear", "cosine", "inverse_sqrt", "polynomial", "wsd", "one_cycle")
# What transformers calls the schedules that have another name here, and one that is no name but a key of its own.
SCHEDULES = {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}
_SAID = {
    "cosine_with_min_lr": "it is cosine here, with optim.min_lr_ratio (a share of learning_rate) for its min_lr_rate",
    "cosine_warmup_with_min_lr": "it is cosine here, with optim.min_lr_ratio (a share of learning_rate) for its "
    "min_lr_rate, and its rates come a step earlier than these",
    "cosine_with_restarts": "restarts can be written as points: [[step, rate], ...]",
    "reduce_lr_on_plateau": "a rate that follows the scores would differ between a run and its resume",
}
_ENDING = ("linear", "cosine", "polynomial", "wsd", "one_cycle")  # schedules that end at `min_lr_ratio`
# What an optimizer takes where `schedule` is not given, if it is not linear.
_USUAL = {"schedule_free": "constant"}


def _schedule(value: Any) -> Any:
    if not isinstance(value, list):
        if str(value) in _SAID:
            raise ValueError(f"{value!r} will not do: {_SAID[str(value)]}")
        if (value := SCHEDULES.get(str(value), value)) not in NAMES:
            raise ValueError(
                f"{value!r} will not do: wanted is one of {', '.join(NAMES)}, or points [[step, rate], ...]"
            )
        return value
    told = "wanted are points [[step, rate], ...] in the order of their steps, the first of them 0"
    try:
        points = [(int(step), float(rate)) for step, rate in value if step == int(step)]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{value!r} will not do: {told}") from None
    steps = [step for step, _ in points]
    if len(points) < len(value) or not points or steps[0] != 0 or steps != sorted(set(steps)):
        raise ValueError(f"{value!r} will not do: {told}")
    if not all(0 <= rate < math.inf for _, rate in points) or not any(rate for _, rate in points):
        raise ValueError(f"{value!r} will not do: rates are finite and not negative, and one of them is more than 0")
    return points


class Group(Section):
    """Weights that have a rate or a decay of their own."""

    match: str = Field(min_length=1, description="their names, with * for any part of a name")
    learning_rate: float | None = Field(None, gt=0, description="their highest rate")
    weight_decay: float | None = Field(None, ge=0, description="theirs; biases and norms have none all the same")


def _groups(value: Any) -> Any:
    """Errors: `ValueError`, which names the group and its key."""
    if not isinstance(value, list):
        raise ValueError("wanted is a list of groups, such as [{match: 'classifier.*', learning_rate: 1e-3}]")
    for place, each in enumerate(value):
        try:
            Group.model_validate(each)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0]) if first["loc"] else ""
            wanted = first["msg"].removeprefix("Input should be ")
            wrong = {
                "extra_forbidden": f"unknown key {key!r}; known are {', '.join(Group.model_fields)}",
                "missing": f"{key} is missing: the names of its weights, with * for any part of a name",
            }.get(first["type"], f"{f'{key}: ' if key else ''}{first['input']!r} will not do: it has to be {wanted}")
            raise ValueError(f"group {place + 1}: {wrong}") from None
    return value


class OptimSection(PluginSection):
    section = "optim"

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
    warmup_steps: Steps = Field(0, description="steps of linear warm-up from 0 (wsd: from min_lr_ratio)")
    warmup_fraction: float = Field(0.0, ge=0, le=1, description="the same as a share of all steps")
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="what linear, cosine, polynomial, wsd and one_cycle end at: share of learning_rate"
    )
    power: float = Field(1.0, gt=0, description="exponent of polynomial")
    decay_fraction: float = Field(0.1, gt=0, le=1, description="share of all steps, the last ones, in which wsd falls")
    decay_steps: Steps = Field(0, description="the same as steps, instead of decay_fraction; 0: not given")
    decay_shape: Literal["linear", "cosine", "sqrt"] = Field(
        "linear", description="how wsd falls; sqrt: 1 - the root of the share that is done"
    )
    weight_decay: float = Field(0.01, ge=0, description="not applied to biases and norms")
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
        description="with model.dtype bfloat16: a float32 copy of the weights, which is updated and rounded into them; "
        "false: none, and updates below a weight's last bit are lost",
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
        with suppress(ValueError):  # points that will not do are told by their own key
            if isinstance(points := _schedule(values["schedule"]), list):
                values.setdefault("learning_rate", max(rate for _, rate in points))
        return values

    @model_validator(mode="after")
    def _of_its_schedule(self) -> OptimSection:
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError("give warmup_steps or warmup_fraction, and not both")
        points = isinstance(self.schedule, list)
        if isinstance(self.schedule, list) and self.learning_rate != (top := max(rate for _, rate in self.schedule)):
            raise ValueError(
                f"learning_rate is {self.learning_rate:g}, and the highest of the points in schedule {top:g}: leave "
                "learning_rate out"
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
        for key, found in wrong.items():
            if found:
                said = "points" if points else self.schedule
                raise ValueError(f"{key} has no meaning with schedule: {said}; leave it out")
        return self
