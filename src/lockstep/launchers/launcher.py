"""The interface of a launcher: plan a job, start it, and query or stop it from another terminal.

In: a run. Out: a `LaunchPlan`, which is plain data (`lockstep plan` prints it, tests compare it), and an exit status.
Methods that start a run take the plan; those that query or stop a started run take its folder and its `JobRecord`.
Imports no torch at the top.
"""

from __future__ import annotations

import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.config.errors import coded
from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection, Section
from lockstep.distributed import job_record
from lockstep.distributed.job_record import TRAIN, JobRecord, State
from lockstep.track.console import LOG, Console, error

if TYPE_CHECKING:
    from lockstep.data.job import Job


@dataclass(frozen=True)
class LaunchPlan:
    """Complete description of what a launcher starts."""

    run: Run  # as the ranks receive it
    processes: int  # total over all machines
    command: list[str]  # the command of each process
    variables: Mapping[str, str] = field(default_factory=dict)  # its environment variables
    files: Mapping[str, str] = field(default_factory=dict)  # path -> text, written before the start
    notes: list[str] = field(default_factory=list)  # printed for the user
    facts: Mapping[str, str] = field(default_factory=dict)  # shown instead of the files, unless --verbose
    job: Job | None = None  # resolved job for ranks on this machine; None: each rank resolves the run

    @property
    def launch(self) -> LaunchSection:
        """The section `launch` of the run."""
        return self.run.launch

    @property
    def folder(self) -> Path:
        """OUTPUT."""
        return self.run.folder

    def resolved(self, job: Job) -> LaunchPlan:
        """Return the plan of a resolved job, whose defaults are adapted to the model."""
        return replace(self, run=job.run, job=job)


class Launcher(ABC):
    """Base class of launchers, which start the ranks of a run."""

    plugin: ClassVar[str] = "launchers"
    joins: ClassVar[bool] = False  # True: this process becomes one rank and decides only with the others
    # True: `start` submits the job to a scheduler or service, and writes OUTPUT/launch.json as soon as it has the job's
    # id. See `SubmittedJob`.
    submits: ClassVar[bool] = False
    # False: the ranks do not see this machine's files, so no data is prepared here and OUTPUT is not read.
    shares_files: ClassVar[bool] = True

    # True: `start` alone starts every rank, on this machine.
    starts_all_ranks: ClassVar[bool] = False
    submits_arrays: ClassVar[bool] = False  # a sweep's trials become one array job of its scheduler
    forks_ranks: ClassVar[bool] = False  # ranks fork from a server with the imports done (`prestart`)
    takes_srun: ClassVar[bool] = False  # a task of a manual `srun` becomes one of its ranks

    class Options(Section):
        """The launcher's own keys in the section `launch`."""

    @classmethod
    def fewest_machines(cls, launch: LaunchSection) -> int | None:
        """Return the fewest machines that a job can shrink to, or None if it cannot lose any."""
        return None

    @classmethod
    def meets_on_loopback(cls, launch: LaunchSection) -> bool:
        """Return whether the rendezvous is at this machine's loopback address."""
        return False

    @classmethod
    def loses_ranks(cls, launch: LaunchSection) -> bool:
        """Return whether the keys allow a single-machine job to continue without some ranks."""
        return False

    @classmethod
    def options(cls, launch: LaunchSection) -> Any:
        """Return this launcher's keys as an instance of its `Options`."""
        return cls.Options.model_validate(launch.options)

    @abstractmethod
    def plan(self, run: Run) -> LaunchPlan:
        """Return the plan of a run, without side effects: one run has one plan per machine. Errors: `RunError`."""

    def check(self, plan: LaunchPlan) -> None:  # noqa: B027 - most have nothing to check
        """Check for problems before data is prepared or anything starts: a missing program or package, a job that the
        scheduler rejects. Errors: `RunError`."""

    def memory(self, plan: LaunchPlan) -> float | None:
        """Return the bytes of memory for each process, or None if not known here."""
        return None

    def leads(self, plan: LaunchPlan) -> bool:
        """Return whether this process leads the job: it writes OUTPUT/run.yaml and OUTPUT/launch.json. If several
        processes are started by hand, exactly one leads."""
        return plan.variables.get("RANK", "0") == "0"

    @abstractmethod
    def start(self, plan: LaunchPlan, words: Sequence[str] = TRAIN) -> int:
        """Execute the plan and return the exit status.

        `words`: name of the function that every process calls, and its arguments."""

    # -- a run that was started, possibly by another process ---------------------------------------------------------
    # Defaults for a launcher whose `start` lasts as long as the job. A `SubmittedJob` overrides them.

    def state(self, folder: Path, record: JobRecord) -> State:
        """Query the state of the run from the system that runs it. Errors: `RunError` if that does not answer."""
        state = job_record.state_of_process(record)
        if state.word == "gone":  # its status may be newer than the record
            state = job_record.state_of_process(job_record.read(folder) or record)
        return state

    def logs(self, folder: Path, record: JobRecord, follow: bool) -> Iterator[str]:
        """Yield the lines of the log, oldest first; with `follow`, until the run ends. Errors: `RunError`."""
        path = job_record.inside(folder / LOG, folder)
        return job_record.lines_of(path, follow, lambda: self.state(folder, record).live)

    def stop(self, folder: Path, record: JobRecord) -> str:
        """Request that the run saves a checkpoint and ends with status 75, without a restart by its scheduler.

        Returns immediately, with a description of the action ("SIGTERM sent to process 12"); poll `state` for the end.
        Errors: `RunError`."""
        return job_record.stop_process(record)


class SubmittedJob(Launcher):
    """Base of launchers that submit a job to a scheduler or service and show its log until it ends.

    A subclass implements `submit`, `label`, `state`, `logs` and `stop`."""

    plugin: ClassVar[str] = "launchers"
    submits = True
    every_s: ClassVar[float] = 10.0  # polling interval for the job's state
    afterwards: ClassVar[str] = ""  # message suffix for a job that `start` does not wait for: how to fetch its results

    @abstractmethod
    def submit(self, plan: LaunchPlan) -> JobRecord | None:
        """Submit the job and return its record, or None if this run's job is complete already. Errors: `RunError`; then
        nothing is submitted."""

    @abstractmethod
    def label(self, record: JobRecord) -> str:
        """Return the job's name for messages: `training job NAME`."""

    def waits(self, launch: LaunchSection) -> bool:
        """Return whether `start` waits for the end of the job; otherwise it returns after submission."""
        return bool(self.options(launch).wait)

    def complete(self, plan: LaunchPlan, record: JobRecord) -> None:
        """Fetch the results of a finished job, or print their location. Errors: `RunError`."""

    def start(self, plan: LaunchPlan, words: Sequence[str] = TRAIN) -> int:
        name = plan.launch.name
        if tuple(words) != TRAIN:
            text = f"launch.name: {name} only trains; use launch.name=local to verify a few steps here"
            raise RunError("LS7383", text)
        record = self.submit(plan)
        if record is None:
            return 0
        job_record.write(plan.folder, record)
        Console(True).say(f"{self.label(record)} is submitted; the request is in {', '.join(plan.files)}")
        if self.waits(plan.launch):
            return self.watch(plan, record)
        Console(True).say(
            f"to manage the job: lockstep status|logs|stop {shlex.quote(str(plan.folder))}{self.afterwards}"
        )
        return 0

    def watch(self, plan: LaunchPlan, record: JobRecord) -> int:
        """Show the log of a submitted job until it ends, and return the exit status. An interrupt ends the display, not
        the job."""
        try:
            for line in self.logs(plan.folder, record, follow=True):
                Console(True).say(line)
        except KeyboardInterrupt:
            Console(True).say(
                f"the job keeps running. lockstep logs {plan.folder} shows its log, lockstep stop {plan.folder} ends it"
            )
            raise
        while (state := self.state(plan.folder, record)).live:
            time.sleep(self.every_s)
        if state.word == "done":
            self.complete(plan, record)
        elif state.word == "stopped":
            Console(True).say(f"{self.label(record)} was stopped; the same command resumes from the last checkpoint")
        else:
            error(coded("LS7281", f"{self.label(record)} failed: {state.text or state.word}"))
        job_record.note(plan.folder, status=state.status, ended=time.time())
        return 1 if state.status is None else int(state.status)


def write_files(plan: LaunchPlan) -> None:
    """Write the files of a plan. Errors: `RunError`."""
    try:
        for path, text in plan.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")
    except OSError as failure:
        raise RunError("LS7388", f"output: cannot write {failure.filename}: {failure.strerror}") from None


def call(entry: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Call `entry(*arguments)`: for launchers that take single texts, and not a tuple, for patterns of their own."""
    entry(*arguments)
