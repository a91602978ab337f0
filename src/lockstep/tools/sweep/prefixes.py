"""Which trials of a sweep begin with the same steps: each stretch that several have in common is computed once.

In: the runs of the trials, in their order. Out: for some of them an earlier trial, and how many of its steps it begins
with. Trials are a tree of such stretches: what is computed in all is each edge of it, once. A trial that others begin
with is an ordinary one that keeps a checkpoint where they leave it (`checkpoint.at`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.config import plugins
from lockstep.config.run import Run, RunError
from lockstep.data.prepare import prepare
from lockstep.training.shared_prefix import OF_STEPS, Course, course, parting, shares_nothing

WORTH = 0.05  # of a trial's steps: fewer (a warm-up from 0 has its first step in common with any) are computed again


@dataclass(frozen=True)
class Tree:
    """Trials by name."""

    begins: dict[str, tuple[str, int]] = field(default_factory=dict)  # trial -> an earlier one, and steps of it
    courses: dict[str, Course] = field(default_factory=dict)  # of those that are alike in all but their steps

    def left_at(self, name: str) -> list[int]:
        """After which steps of a trial others leave it."""
        return sorted({step for other, step in self.begins.values() if other == name})

    @property
    def summary(self) -> str:
        """The steps that it saves; empty where nothing is shared."""
        if not self.begins:
            return ""
        alone = sum(len(each.rates) for each in self.courses.values())
        left = alone - sum(step for _, step in self.begins.values())
        return f"{len(self.begins)} trial(s) begin with steps of another one: {left:,} steps instead of {alone:,}"

    def begin(self, name: str, runs: Mapping[str, Run]) -> str:
        """Give a trial the checkpoint that it begins with. Returns what is told. Errors: `RunError`, where the other
        trial has left none; then it is computed from the start."""
        from lockstep.tools.branch import place, take

        other, step = self.begins[name]
        begun = take(runs[other].folder, step, runs[name], self.courses[name])
        place(begun, runs[name], self.courses[name])
        return f"begins with step {begun.step} of {other}"


def shared_steps(runs: Mapping[str, Run]) -> Tree:
    """The tree of these trials. Prepares their data where any two may share. Data that cannot be prepared are told of
    by the trial that wants them."""
    tree = Tree()
    for names in _alike(runs):
        try:
            run = runs[names[0]]
            prepared = prepare(run, plugins.find("tasks", run.task.name))
            for name in names:
                tree.courses[name] = course(runs[name], prepared)
        except (RunError, OSError):
            for name in names:
                tree.courses.pop(name, None)
            continue
        for place, name in enumerate(names):
            shared = [(parting(tree.courses[other], tree.courses[name])[0], other) for other in names[:place]]
            most = max((steps for steps, _ in shared), default=0)
            if most >= WORTH * len(tree.courses[name].rates):
                tree.begins[name] = next(other for steps, other in shared if steps == most), most
    return tree


def _alike(runs: Mapping[str, Run]) -> list[Sequence[str]]:
    """Names of trials that differ in nothing but keys that are about single steps, where there are several."""
    groups: dict[str, list[str]] = {}
    for name, run in runs.items():
        values = run.arithmetic()
        fixed = {k: v for k, v in values.items() if k not in OF_STEPS} | {"": _read(values.get("data.sources"))}
        key = json.dumps(fixed, sort_keys=True)
        groups.setdefault(key, []).append(name)
    return [names for names in groups.values() if len(names) > 1 and not _refused(runs, names)]


def _read(sources: Any) -> Any:
    """What a mixture is read from, without how much of each."""
    return [{k: v for k, v in each.items() if k != "weight"} for each in sources or ()]


def _refused(runs: Mapping[str, Run], names: Sequence[str]) -> bool:
    first = runs[names[0]].arithmetic()
    return any(
        shares_nothing(runs[name], {k: v for k, v in runs[name].arithmetic().items() if first.get(k) != v}) is not None
        for name in names
    )
