"""DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR -> `optim.schedule`.

In: the section `scheduler` of DeepSpeed's settings, and the known keys of the run file. Out: its learning rates.
DeepSpeed sets the rate after each update, and its schedule begins after the first one. So the first two updates have
the lowest rate, and every other rate comes one step later than in transformers and lockstep. Linear schedules become
points with the same rates. A cosine, or a schedule with an unknown number, is reported as different.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.lab.import_config.table import NAMES, RunDraft, number

# Keys that decide the schedule; Trainer's arguments may have set them to something else.
_RATES = ("optim.min_lr_ratio", "optim.power", "optim.decay_steps", "optim.decay_fraction", "optim.decay_shape")
_WARM_UP = ("optim.warmup_steps", "optim.warmup_fraction")


@dataclass(frozen=True)
class DeepSpeedScheduler:
    """A DeepSpeed scheduler and its parameters, with defaults; "auto" means that Trainer's arguments decide."""

    kind: str
    values: Mapping[str, Any]

    def points(self, keys: Mapping[str, Any]) -> list[list[float]] | None:
        """Return the schedule as points of (step, rate); None if points cannot express it, or a number is unknown."""
        if self.kind == "WarmupCosineLR":
            return None
        warmup = self._steps("warmup_num_steps", self._warm_up(keys))
        top = number(self._value("warmup_max_lr", keys.get("optim.learning_rate")))
        low = number(self._value("warmup_min_lr", 0.0))
        if warmup is None or top is None or low is None or low > top or not top:
            return None
        warmup = max(2, warmup)
        points = [[0, low], [1, low], [1 + warmup, top]]
        if self.kind == "WarmupDecayLR":
            total = self._steps("total_num_steps", keys.get("steps"))
            if total is None or total <= warmup:  # then it drops at once
                return None
            points.append([1 + total, low])
        return points

    def _value(self, name: str, auto: Any) -> Any:
        return auto if self.values.get(name, "auto") == "auto" else self.values[name]

    def _steps(self, name: str, auto: Any) -> int | None:
        steps = number(self._value(name, auto))
        return int(steps) if steps is not None and steps > 0 else None

    @staticmethod
    def _warm_up(keys: Mapping[str, Any]) -> float | None:
        share, steps = number(keys.get("optim.warmup_fraction")), number(keys.get("steps"))
        return math.ceil(share * steps) if share and steps else number(keys.get("optim.warmup_steps"))


def move(section: Any, draft: RunDraft) -> None:
    """Set the keys that are known now, and schedule the points for when all others are. DeepSpeed's schedule overrides
    the one in Trainer's arguments."""
    if not isinstance(section, Mapping):
        return
    kind, values = str(section.get("type")), section.get("params") or {}
    if kind not in NAMES["deepspeed_schedules"]:
        why = "WarmupLR, WarmupDecayLR and WarmupCosineLR have a counterpart"
        draft.drop("scheduler", kind, why, True, ("optim.schedule",))
        return
    for key in _RATES:
        draft.keys.pop(key, None)
    draft.set("optim.schedule", NAMES["deepspeed_schedules"][kind], f"scheduler {kind}")
    defaults = {"warmup_num_steps": 1000, "warmup_type": "log"} | NAMES["deepspeed_schedule_defaults"].get(kind, {})
    scheduler = DeepSpeedScheduler(kind, defaults | values)
    for name, value in scheduler.values.items():
        _set(scheduler, name, value, "" if name in values else ", by default", draft)
    draft.at_end.append(lambda draft: _settle(scheduler, draft))


def _set(scheduler: DeepSpeedScheduler, name: str, value: Any, by_default: str, draft: RunDraft) -> None:
    """Set one parameter as if the schedule were transformers'."""
    keys = NAMES["deepspeed_schedule_options"]
    if value == "auto" or (name, value) == ("warmup_type", "linear") or name == "warmup_min_lr":
        return
    count = number(value)
    if name in keys and count is None:
        draft.drop(f"scheduler: {name}", value, "expected one number", True, ("optim.schedule",))
    elif name == "total_num_steps":
        if not {"steps", "epochs"} & draft.keys.keys():
            draft.set("steps", int(count or 0), f"scheduler: {name}")
    elif name == "warmup_num_steps":
        draft.keys.pop("optim.warmup_fraction", None)
        draft.set(keys[name], max(2, int(count or 0)), f"scheduler: {name}{by_default}")
    elif name in keys:
        draft.set(keys[name], count, f"scheduler: {name}{by_default}")
    elif name != "warmup_min_ratio" or count:
        draft.drop(f"scheduler: {name}{by_default}", value, "a warm-up is linear, from 0", True, ("optim.schedule",))


def _settle(scheduler: DeepSpeedScheduler, draft: RunDraft) -> None:
    """Set points in place of a schedule name, or report the difference. A schedule given by hand stays."""
    if {"optim.schedule", *_WARM_UP, *_RATES} & draft.by_hand.keys():
        return
    kind, total = scheduler.kind, number(scheduler.values.get("total_num_steps"))
    if (points := scheduler.points(draft.keys)) is not None:
        draft.set("optim.schedule", points, f"scheduler {kind}: the first two updates use its lowest rate")
        for key in {*_WARM_UP, "optim.learning_rate"} - draft.by_hand.keys():
            draft.keys.pop(key, None)
        return
    if (low := scheduler.values.get("warmup_min_lr", 0)) not in (0, "auto"):
        why = "a warm-up begins at 0; optim.schedule takes points, [[step, rate], ...]"
        draft.drop("scheduler: warmup_min_lr", low, why, True, ("optim.schedule",))
    warmup = draft.keys.get("optim.warmup_steps", 0)
    if kind == "WarmupDecayLR" and total is not None and total <= warmup:
        why = f"it falls at once after its warm-up of {warmup} steps; optim.schedule takes points, [[step, rate], ...]"
        draft.drop("scheduler: total_num_steps", f"{total:g}", why, True, ("optim.schedule",))
    elif total is not None and total != draft.keys.get("steps"):
        why = "in lockstep the schedule ends with the run, whose length differs or is in epochs: give steps"
        draft.drop("scheduler: total_num_steps", f"{total:g}", why, True, ("steps", "optim.schedule"))
    late = "in the warm-up every rate" if kind == "WarmupCosineLR" else "every rate"
    draft.notes.append(
        f"the first two updates of DeepSpeed's {kind} have rate 0, so {late} comes one step later there than here"
    )
