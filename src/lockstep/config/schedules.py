"""Learning rate schedules: the rate of each step.

In: the section `optim` of the run file, and the number of steps. Out: the rate of each step, and a
one-line plot for a terminal. Imports no torch: `lockstep plan` and the report plot the schedule, too.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

from lockstep.config import plugins
from lockstep.config.errors import InvalidValue

NAMES = ("constant", "linear", "cosine", "inverse_sqrt", "polynomial", "wsd", "one_cycle")
# transformers' name of a schedule -> ours, where they differ.
SCHEDULES = {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}
_ADVICE = {
    "cosine_with_min_lr": "it is cosine here, with optim.min_lr_ratio (a share of learning_rate) for its min_lr_rate",
    "cosine_warmup_with_min_lr": "it is cosine here, with optim.min_lr_ratio (a share of learning_rate) for its "
    "min_lr_rate; its rates are reached one step earlier than here",
    "cosine_with_restarts": "restarts can be written as points: [[step, rate], ...]",
    "reduce_lr_on_plateau": "a rate that depends on scores would differ after a resume",
}
ENDING = ("linear", "cosine", "polynomial", "wsd", "one_cycle")  # schedules that end at `min_lr_ratio`


class Schedule(Protocol):
    """The keys of the section `optim` that determine the learning rate."""

    name: str  # of the optimizer
    learning_rate: float  # the highest one
    schedule: str | list[tuple[int, float]]
    warmup_steps: int
    warmup_fraction: float
    min_lr_ratio: float
    power: float
    decay_fraction: float
    decay_steps: int
    decay_shape: Literal["linear", "cosine", "sqrt"]


def parse_schedule(value: Any) -> Any:
    """Validate `optim.schedule`: return a name, or points (step, rate). Errors: `InvalidValue`."""
    if not isinstance(value, list):
        if str(value) in _ADVICE:
            raise InvalidValue("LS1070", f"invalid value {value!r}; {_ADVICE[str(value)]}")
        if (value := SCHEDULES.get(str(value), value)) not in NAMES:
            near = difflib.get_close_matches(str(value), NAMES, 1) or [each for each in NAMES if each in str(value)]
            hint = f"did you mean {near[0]!r}? " if near else ""
            expected = f"{hint}expected one of {', '.join(NAMES)}, or points [[step, rate], ...]"
            raise InvalidValue("LS1071", f"invalid value {value!r}; {expected}")
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


BLOCKS = "▁▂▃▄▅▆▇█"
LOOKED_AT = 10_000  # maximum number of steps sampled for the plot
_ONE_CYCLE = (0.3, 1 / 25)  # torch's OneCycleLR: share of the steps with a rising rate, and initial share of the rate


def learning_rate(optim: Schedule, step: int, steps: int) -> float:
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
        first = int(plugins.fact("optimizers", optim.name, "warms_from_one", False))
        return optim.learning_rate * (step + first) / warmup
    return optim.learning_rate * _share(optim, step, steps, warmup)


def _share(optim: Schedule, step: int, steps: int, warmup: int) -> float:
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


def _one_cycle(optim: Schedule, step: int, steps: int) -> float:
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


def drawn(optim: Schedule, steps: int, width: int = 40) -> str:
    """Plot the rates of a run in one line of block characters, with first, highest and last rate, each value once."""
    points = planned(optim, steps, LOOKED_AT)
    rates = [rate for _, rate in points]
    columns = [rates[round(i * (len(rates) - 1) / (width - 1))] for i in range(width)]
    line = "".join(BLOCKS[min(7, int(8 * rate / (max(rates) or 1.0)))] for rate in columns)
    top, highest = max(points, key=lambda point: point[1])
    how = "points" if isinstance(optim.schedule, list) else optim.schedule
    first, most, last = f"{rates[0]:.3g}", f"{highest:.3g}", f"{rates[-1]:.3g}"
    if len({f"{rate:.3g}" for rate in rates}) == 1:
        text = first
    elif first == last == most:
        bottom, lowest = min(points, key=lambda point: point[1])
        text = f"{first} at first and at the last, {lowest:.3g} at step {bottom:,}"
    elif last == most and all(rate == highest for step, rate in points if step >= top):
        text = f"{first} at first, {last} from step {top:,} on"
    else:
        text = f"{first} at first, {f'{most} at step {top:,}, ' * (most not in (first, last))}{last} at the last"
    return f"{line} {how}: {text}"


def planned(optim: Schedule, steps: int, count: int) -> list[tuple[int, float]]:
    """Return (step, rate) of about `count` updates, including those where warm-up ends and all given points."""
    ends = {0, steps - 1, optim.warmup_steps, math.ceil(optim.warmup_fraction * steps)}
    ends |= {step for step, _ in optim.schedule} if isinstance(optim.schedule, list) else set()
    evenly = {round(i * (steps - 1) / max(1, count - 1)) for i in range(count)}
    return [(step, learning_rate(optim, step, steps)) for step in sorted(ends | evenly) if step < steps]
