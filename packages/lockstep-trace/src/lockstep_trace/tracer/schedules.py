"""Tracks learning rate schedulers and loaded states: which scheduler steps which optimizer, how often, and whether it
was created after the optimizer's state was loaded.

In: calls from `hooks.py`. Out: counts for a step's record.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from .layouts import inside, parameters_of

FROM_BASE = ("LambdaLR", "OneCycleLR", "CyclicLR")  # schedulers whose rates do not depend on the previous rate


@dataclass
class Scheduler:
    """A scheduler since its creation. `foreign`: created by a trainer that decides itself when to step it."""

    ref: weakref.ref[Any]
    optimizer: weakref.ref[Any]
    name: str
    foreign: bool = False
    stepped: bool = False
    fresh: bool = False  # stepped since the last step of any optimizer
    length: int | None = None  # steps that it is made for
    function: Any = None  # of a LambdaLR, which may be gone at the end
    number: int | None = None  # of its optimizer
    begun: list[float] = field(default_factory=list)  # rates when it was made
    resumed: bool = False  # its state was loaded, or it began later than at its first step
    counts: dict[str, int] = field(default_factory=dict)  # caller -> number of steps
    watched: dict[str, Any] = field(default_factory=dict)  # of ReduceLROnPlateau: mode, scores, rates after each


@dataclass
class Loaded:
    """An optimizer whose state was loaded: its learning rates then, and the scheduler created afterwards. `set_to`:
    rates that this scheduler set. `resumed`: rates of the scheduler's own loaded state."""

    rates: list[float]
    scheduler: str | None = None
    set_to: list[float] | None = None
    resumed: list[float] | None = None
    earlier: str | None = None  # a scheduler that was created before, was not stepped and loaded no state
    begun: list[float] | None = None  # the rates that it began with
    peaks: list[float] = field(default_factory=list)  # rates that the loaded state's schedule multiplies
    own_peaks: list[float] = field(default_factory=list)  # those of the earlier scheduler


class Schedules:
    """All schedulers of a process."""

    def __init__(self) -> None:
        self.schedulers: list[Scheduler] = []
        self._counted: dict[tuple[int, int, str], int] = {}  # (optimizer, scheduler, caller) -> count at its last step
        self._loaded: dict[int, tuple[weakref.ref[Any], Loaded]] = {}  # by id of the optimizer

    def register(self, scheduler: Any, foreign: bool) -> None:
        """Add a new scheduler, which has set the learning rates of its first step."""
        optimizer = scheduler.optimizer
        name = type(scheduler).__name__
        self.schedulers.append(Scheduler(weakref.ref(scheduler), weakref.ref(optimizer), name, foreign))
        self.schedulers[-1].begun = rates_of(optimizer)
        if (loaded := self.loaded_of(optimizer)) is not None and not foreign:
            loaded.scheduler, loaded.set_to, loaded.resumed = name, rates_of(optimizer), None

    def stepped(self, scheduler: Any, by: str, counted: bool) -> None:
        """Record a step of a scheduler. `counted`: not part of another scheduler's step."""
        known = next((s for s in self.schedulers if s.ref() is scheduler), None)
        if known is None:
            known = Scheduler(weakref.ref(scheduler), weakref.ref(scheduler.optimizer), type(scheduler).__name__, True)
            self.schedulers.append(known)
        for each in self.schedulers:
            each.stepped = each.stepped or each.optimizer() is scheduler.optimizer
        known.fresh = True
        if not known.counts and getattr(scheduler, "last_epoch", 0) > 0:  # `last_epoch`, or set by hand
            known.resumed = True
        if counted:
            known.counts[by] = known.counts.get(by, 0) + 1
            known.length = known.length or length_of(scheduler)
            known.function = (getattr(scheduler, "lr_lambdas", None) or [None])[0]

    def watches(self, scheduler: Any, score: Any, steps: list[int]) -> None:
        """Record a score that ReduceLROnPlateau received, and the rate after it."""
        known = next((s for s in self.schedulers if s.ref() is scheduler), None)
        if known is not None:
            row = known.watched or {"mode": scheduler.mode, "scores": [], "rates": [], "steps": []}
            known.watched = row
            row["scores"].append(float(score))
            row["rates"].append(rates_of(scheduler.optimizer)[0])
            row["steps"].append(list(steps))

    def lengths(self, steps: list[int]) -> list[dict[str, Any]]:
        """Return name, length, number of steps and optimizer of each scheduler that has a length and was stepped.
        `steps`: of each optimizer."""
        for each in self.schedulers:
            if each.number is not None and not each.length and ends_at(each.function, steps[each.number]):
                each.length = steps[each.number]
        return [
            {"name": s.name, "length": s.length, "count": sum(s.counts.values()), "opt": s.number}
            | {"resumed": s.resumed}
            for s in self.schedulers
            if s.length and s.number is not None and s.counts and not s.counts.get("accelerate")
        ]

    def since(self, optimizer: Any, number: int) -> dict[str, int]:
        """Return name -> number of steps of an optimizer's schedulers since the optimizer's last step."""
        if not self.schedulers:
            return {}
        members, rows = inside(optimizer), {}
        for i, each in enumerate(self.schedulers):
            if not members & inside(each.optimizer()):
                continue
            each.number = number
            for by, count in each.counts.items():
                key = (number, i, by)
                new, self._counted[key] = count - self._counted.get(key, 0), count
                if new:
                    name = f"{each.name} by {by}" if by else each.name
                    while name in rows:  # two schedulers of one class
                        name = f"{name}'"
                    rows[name] = new
        return rows

    def elsewhere(self, optimizer: Any) -> list[str]:
        """Return the schedulers stepped since the last step of any optimizer whose optimizer is another object with
        parameters of this one."""
        fresh = [each for each in self.schedulers if each.fresh]
        if not fresh:
            return []
        members, own = inside(optimizer), parameters_of(optimizer)
        names = []
        for each in fresh:
            other = each.optimizer()
            if other is not None and not members & inside(other) and own & parameters_of(other):
                names.append(each.name)
            each.fresh = False
        return names

    def idle(self, optimizer: Any) -> list[tuple[int, str]]:
        """Return (number, name) of an optimizer's schedulers that were never stepped."""
        idle = [
            (i, each)
            for i, each in enumerate(self.schedulers)
            if not each.stepped and not each.foreign and each.ref() is not None
        ]
        members = inside(optimizer) if idle else set()
        return [(i, each.name) for i, each in idle if members & inside(each.optimizer())]

    def loads(self, optimizer: Any) -> None:
        """Record that an optimizer's state was loaded, unless the state is empty (no steps yet)."""
        if optimizer.state:
            peaks = [float(g["initial_lr"]) for g in optimizer.param_groups if "initial_lr" in g]
            row = weakref.ref(optimizer), Loaded(rates_of(optimizer), peaks=peaks)
            self._loaded[id(optimizer)] = row

    def resumes(self, scheduler: Any) -> None:
        """Record that a scheduler's state was loaded."""
        for each in self.schedulers:
            each.resumed = each.resumed or each.ref() is scheduler
        loaded = self.loaded_of(getattr(scheduler, "optimizer", None))
        if loaded is not None and loaded.scheduler == type(scheduler).__name__:
            loaded.resumed = [float(rate) for rate in getattr(scheduler, "_last_lr", None) or []]

    def loaded_of(self, optimizer: Any) -> Loaded | None:
        ref, loaded = self._loaded.get(id(optimizer), (None, None))
        return loaded if ref is not None and ref() is optimizer else None

    def pop_loaded(self, optimizer: Any) -> dict[str, Any] | None:
        """Return and forget the record of a loaded optimizer at its first step after loading, or None."""
        loaded = self.loaded_of(optimizer)
        if loaded is None:
            return None
        del self._loaded[id(optimizer)]
        members = inside(optimizer)
        own = [s for s in self.schedulers if members & inside(s.optimizer())]
        if loaded.scheduler is None and len(own) == 1 and not (own[0].counts or own[0].resumed or own[0].foreign):
            known = own[0].ref()
            fresh = known is not None and getattr(known, "last_epoch", 1) == 0
            loaded.earlier = own[0].name if fresh and own[0].name in FROM_BASE else None
            loaded.begun = own[0].begun
            loaded.own_peaks = [float(rate) for rate in getattr(known, "base_lrs", None) or []]
        return dict(vars(loaded))


def length_of(scheduler: Any) -> int | None:
    """Return the number of steps in a scheduler's schedule, or None if it is not stated."""
    if type(scheduler).__name__ in ("CosineAnnealingLR", "OneCycleLR", "PolynomialLR", "LinearLR"):
        length = next((v for n in ("T_max", "total_steps", "total_iters") if (v := getattr(scheduler, n, None))), None)
    elif type(scheduler).__name__ == "SequentialLR":
        last = length_of(scheduler._schedulers[-1])
        length = None if last is None else scheduler._milestones[-1] + last
    else:  # transformers' schedules
        partial = next((f for f in getattr(scheduler, "lr_lambdas", None) or [] if hasattr(f, "keywords")), None)
        length = None if partial is None else partial.keywords.get("num_training_steps")
    return int(length) if isinstance(length, int | float) and length > 0 else None


MOST_CALLS = 10_000
NUMERIC = ("max", "min", "float", "int", "abs", "round", "math", "cos", "sin", "pi", "exp", "sqrt", "pow", "log")


def ends_at(function: Any, step: int) -> bool:
    """Return whether the function of a LambdaLR falls to 0, or to its last value, at a step. Only a function of
    numbers is called."""
    if type(function) is not FunctionType or step < 3:
        return False
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    known = [function.__globals__.get(name) for name in function.__code__.co_names if name not in NUMERIC]
    if not all(isinstance(value, int | float) for value in [*cells, *known]):
        return False
    try:
        *earlier, before, at = (float(function(n)) for n in range(max(step - MOST_CALLS, 1), step + 1))
        stays = all(float(function(n)) == at for n in (step + 1, 2 * step))
    except Exception:  # it may not be defined there
        return False
    return (abs(at) < 1e-12 or stays) and min(
        before, *earlier
    ) > at + 1e-9  # at 0 for the first time, unlike a function with cycles


def rates_of(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def unread_rate(optimizer: Any) -> float | None:
    """Return the number in an attribute `lr` of a torch optimizer, which reads only the rates of its groups."""
    value = vars(optimizer).get("lr") if type(optimizer).__module__.startswith("torch.optim") else None
    return float(value) if isinstance(value, int | float) else None
