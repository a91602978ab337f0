"""Determine the first steps that two runs share, which one of them does not need to recompute.

In: two runs and their data. Out: the first step whose learning rate or examples differ, or the key that changes the
arithmetic of all steps. Rates and examples are computed and compared step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.config import plugins
from lockstep.config.schedules import learning_rate
from lockstep.config.user_code import is_own
from lockstep.data.job import Job
from lockstep.data.order import Order
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader

# Keys that affect a step only through its learning rate.
_OF_RATES: tuple[str, ...] = ("learning_rate", "schedule", "warmup_steps", "warmup_fraction", "min_lr_ratio", "power")
_OF_RATES += ("decay_fraction", "decay_steps", "decay_shape")
OF_RATES = {"epochs", "steps", *(f"optim.{key}" for key in _OF_RATES)}
OF_STEPS = OF_RATES | {"optim.groups", "data.sources"}  # keys that affect rates or examples: decided by comparing steps


@dataclass(frozen=True)
class Course:
    """Inputs of a run's steps that may differ between runs: learning rates and examples."""

    rates: np.ndarray  # float64 [steps]
    scales: tuple[tuple[Any, ...], ...]  # learning-rate scales of `optim.groups`
    order: Order
    weights: tuple[Any, ...]  # of `data.sources`


def course(job: Job) -> Course:
    """Compute the course of a run, with its data prepared. Errors: `RunError`."""
    run = job.run
    feed = StepLoader(make_task(job), range(run.micro_batches), torch.device("cpu"))
    rates = np.array([learning_rate(run.optim, step, feed.total) for step in range(feed.total)])
    scales = tuple(
        (g.match, g.weight_decay, None if g.learning_rate is None else g.learning_rate / run.optim.learning_rate)
        for g in run.optim.groups
    )
    return Course(rates, scales, feed.order, tuple(str(each.schedule) for each in run.data.sources or ()))


def parting(a: Course, b: Course) -> tuple[int, str]:
    """Number of leading steps that are equal in two courses, and a description of the first difference; empty if one
    course ends there."""
    most = min(len(a.rates), len(b.rates))
    if a.scales != b.scales:
        return 0, "the rates of optim.groups, relative to optim.learning_rate, differ"
    other = np.flatnonzero(a.rates[:most] != b.rates[:most])
    same = int(other[0]) if len(other) else most
    if a.weights != b.weights:
        for step in range(same):
            if not np.array_equal(a.order.step(step), b.order.step(step)):
                return step, f"step {step + 1} has other examples"
    if same == most:
        return same, ""
    return same, f"the learning rate of step {same + 1} is {a.rates[same]!s} in one and {b.rates[same]!s} in the other"


def shares_nothing(job: Job, differing: Mapping[str, Any]) -> str | None:
    """Explain why a run cannot reuse another's steps at all, or return None. `differing`: keys in which their
    arithmetic differs."""
    run = job.run
    if not job.same_bits:
        return (
            f"strategy.name: {run.strategy.name} is not bitwise reproducible with these options, so no step can "
            "be shared"
        )
    for key, kind, name in (
        ("task.name", "tasks", run.task.name),
        ("strategy.name", "strategies", run.strategy.name),
    ):
        if differing and is_own(plugins.path_of(kind, name)):
            return f"{key}: {name} is your own code, and may read {sorted(differing)[0]} in any step"
    return None
