"""learning_rate(step): a pure function, and what it looks like.

In: the `optim` section, and how many steps a run has. Out: the rate of each step, or a line of blocks for a terminal.
Nothing here imports torch: `lockstep plan` and the report draw it, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from lockstep.config.optim import OptimSection

BLOCKS = "▁▂▃▄▅▆▇█"
LOOKED_AT = 10_000  # steps whose rates are looked at to draw them
REVISION = "optim.schedule_revision"  # in a run's arithmetic, of schedules that are `revised`; no key of the run file
_ONE_CYCLE = (0.3, 1 / 25)  # torch's OneCycleLR: share of the steps in which it rises, and the share that it begins at


def learning_rate(optim: OptimSection, step: int, steps: int) -> float:
    """The rate of the update numbered `step` (from 0) of `steps`.

    Linear warm-up reaches the full rate with the update after the last warm-up step; then the schedules of transformers
    of the same names: linear and half a cosine (Loshchilov and Hutter, "SGDR", ICLR 2017) to `min_lr_ratio`,
    polynomial, the inverse square root of Vaswani et al., "Attention is all you need", 2017, and wsd (Hu et al.,
    "MiniCPM", 2024; its `sqrt` is of Hägele et al., 2024), which warms up from `min_lr_ratio`, too. `one_cycle` is
    torch's OneCycleLR (Smith and Topin, 2018), without its momentum; the top of its two curves may lie between two
    steps.
    """
    if isinstance(optim.schedule, list):
        return _on_lines(optim.schedule, step)
    warmup = optim.warmup_steps or math.ceil(optim.warmup_fraction * steps)
    if optim.schedule == "one_cycle":
        return optim.learning_rate * _one_cycle(optim, step, steps)
    if step < warmup and optim.schedule == "wsd" and optim.min_lr_ratio:
        return optim.learning_rate * (step / warmup * (1.0 - optim.min_lr_ratio) + optim.min_lr_ratio)
    if step < warmup:
        return optim.learning_rate * step / warmup
    return optim.learning_rate * _share(optim, step, steps, warmup)


def _share(optim: OptimSection, step: int, steps: int, warmup: int) -> float:
    """Of the highest rate, after the warm-up."""
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
    """From 1 to `min_lr_ratio`, where `progress` goes from 0 to 1."""
    if shape == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif shape == "sqrt":
        left = 1.0 - math.sqrt(min(1.0, progress))
    else:
        left = max(0.0, 1.0 - progress)
        left = left if power == 1.0 else left**power
    return max(0.0, left) * (1.0 - minimum) + minimum


def _one_cycle(optim: OptimSection, step: int, steps: int) -> float:
    """Up along half a cosine, and down along another. The only step of a run has the full rate."""
    share, begin = _ONE_CYCLE
    if steps == 1:
        return 1.0
    top = (optim.warmup_steps or (optim.warmup_fraction or share) * steps) - 1
    if step < top:
        return 1.0 - _falling("cosine", step / top, 1.0, 0.0) * (1.0 - begin)
    down = steps - 1 - top
    return _falling("cosine", min(1.0, (step - top) / down) if down > 0 else 0.0, 1.0, optim.min_lr_ratio)


def revised(optim: OptimSection) -> bool:
    """Whether the rates of some runs of this kind are others since revision 2, which is written down with theirs: until
    then the top of `one_cycle` was rounded up to a step, and `wsd` warmed up from 0 whatever its `min_lr_ratio`."""
    if optim.schedule == "one_cycle":
        return not optim.warmup_steps
    return optim.schedule == "wsd" and bool(optim.min_lr_ratio and (optim.warmup_steps or optim.warmup_fraction))


def as_before(optim: OptimSection, steps: int) -> bool:
    """Whether a `revised` run of so many steps has the rates of before all the same."""
    top = (optim.warmup_fraction or _ONE_CYCLE[0]) * steps
    return optim.schedule == "one_cycle" and (steps == 1 or top == math.ceil(top))


def _on_lines(points: Sequence[tuple[int, float]], step: int) -> float:
    """Straight lines between points; the last one holds from then on."""
    for (before, low), (after, high) in pairwise(points):
        if step < after:
            return low + (high - low) * (step - before) / (after - before)
    return points[-1][1]


def drawn(optim: OptimSection, steps: int, width: int = 40) -> str:
    """The rates of a run in one line: blocks, and what they are at the ends and at the top."""
    points = planned(optim, steps, LOOKED_AT)
    rates = [rate for _, rate in points]
    columns = [rates[round(i * (len(rates) - 1) / (width - 1))] for i in range(width)]
    line = "".join(BLOCKS[min(7, int(8 * rate / (max(rates) or 1.0)))] for rate in columns)
    top, highest = max(points, key=lambda point: point[1])
    how = "points" if isinstance(optim.schedule, list) else optim.schedule
    return f"{line} {how}: {rates[0]:.3g} at first, {highest:.3g} at step {top:,}, {rates[-1]:.3g} at the last"


def planned(optim: OptimSection, steps: int, count: int) -> list[tuple[int, float]]:
    """(step, rate) of a run's updates: of all, or of about `count`, those among them where a straight piece ends."""
    ends = {0, steps - 1, optim.warmup_steps, math.ceil(optim.warmup_fraction * steps)}
    ends |= {step for step, _ in optim.schedule} if isinstance(optim.schedule, list) else set()
    evenly = {round(i * (steps - 1) / max(1, count - 1)) for i in range(count)}
    return [(step, learning_rate(optim, step, steps)) for step in sorted(ends | evenly) if step < steps]
