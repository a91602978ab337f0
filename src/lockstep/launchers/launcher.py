"""The interface of a launcher: what would be started, and starting it.

In: a run. Out: a `Plan`, which is data (`lockstep plan` prints it, tests compare it), and an exit status. Never
imports torch at the top.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockstep.run import Run
from lockstep.sections import Section

# What ranks do: the dotted name of a function of (run, world), and further words for it.
TRAIN = ("lockstep.worker.work",)


@dataclass(frozen=True)
class Plan:
    """What a launcher starts, completely."""

    processes: int  # in all, over all machines
    command: list[str]  # what each of them runs
    variables: Mapping[str, str] = field(default_factory=dict)  # set for it
    files: Mapping[str, str] = field(default_factory=dict)  # path -> text, written before
    notes: list[str] = field(default_factory=list)  # what a person should know


class Launcher(ABC):
    """One way to start processes."""

    plugin: ClassVar[str] = "launchers"
    joins: ClassVar[bool] = False  # True: this process becomes one rank, and decides nothing without the others

    class Options(Section):
        """The launcher's own keys in the run file's `launch` section."""

    @classmethod
    def options(cls, run: Run) -> Any:
        """This launcher's own keys, typed: an instance of its `Options`."""
        return cls.Options.model_validate(run.launch.options)

    @abstractmethod
    def plan(self, run: Run) -> Plan:
        """Pure: the same run gives the same plan on the same machine. Errors: `RunError`."""

    @abstractmethod
    def start(self, run: Run, plan: Plan, job: Sequence[str] = TRAIN) -> int:
        """Do exactly what the plan says; every process does `job`. Returns the exit status of the command."""
