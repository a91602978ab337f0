"""The interface of a launcher: what would be started, starting it, and looking after it from another terminal.

In: a run. Out: a `LaunchPlan`, which is data (`lockstep plan` prints it, tests compare it), and an exit status. Never
imports torch at the top.
"""

from __future__ import annotations

import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.config.errors import coded
from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection, Section
from lockstep.distributed import job_record
from lockstep.distributed.job_record import TRAIN, JobRecord, State
from lockstep.track.console import LOG, Console, error

if TYPE_CHECKING:
    from lockstep.training.resolve import Job


@dataclass(frozen=True)
class LaunchPlan:
    """What a launcher starts, completely."""

    processes: int  # in all, over all machines
    command: list[str]  # what each of them runs
    variables: Mapping[str, str] = field(default_factory=dict)  # set for it
    files: Mapping[str, str] = field(default_factory=dict)  # path -> text, written before
    notes: list[str] = field(default_factory=list)  # what a person should know
    job: Job | None = None  # resolved, to be sent to ranks of this machine; None: each rank resolves its run


class Launcher(ABC):
    """One way to start processes."""

    plugin: ClassVar[str] = "launchers"
    joins: ClassVar[bool] = False  # True: this process becomes one rank, and decides nothing without the others
    # True: `start` hands the job over to a scheduler or a service, and writes OUTPUT/launch.json itself as soon as it
    # has the job's id: `SubmittedJob`.
    submits: ClassVar[bool] = False
    # False: the ranks do not see this machine's files, so that no data is prepared here and OUTPUT is not looked at.
    shares_files: ClassVar[bool] = True

    forks_ranks: ClassVar[bool] = False  # its ranks fork from a server that has imported what they need (`prestart`)
    takes_srun: ClassVar[bool] = False  # a task of `srun`, started by hand, becomes one of its ranks

    class Options(Section):
        """The launcher's own keys in the run file's `launch` section."""

    @classmethod
    def fewest_machines(cls, launch: LaunchSection) -> int | None:
        """The fewest machines that a job goes on with after one was taken out; None: none can be."""
        return None

    @classmethod
    def loses_ranks(cls, launch: LaunchSection) -> bool:
        """Whether a job on one machine goes on without single ranks, as far as its keys say."""
        return False

    @classmethod
    def options(cls, run: Run) -> Any:
        """This launcher's own keys, typed: an instance of its `Options`."""
        return cls.Options.model_validate(run.launch.options)

    @abstractmethod
    def plan(self, run: Run) -> LaunchPlan:
        """Pure: the same run gives the same plan on the same machine. Errors: `RunError`."""

    def check(self, run: Run, plan: LaunchPlan) -> None:  # noqa: B027 - most have nothing to check
        """What can be found wrong before data is prepared or anything is started: a program or package that is missing,
        a job that its scheduler refuses. Errors: `RunError`."""

    def memory(self, run: Run, plan: LaunchPlan) -> float | None:
        """Bytes that each process has on the machines it runs on, as far as is known here; None: it is not."""
        return None

    def leads(self, run: Run, plan: LaunchPlan) -> bool:
        """Whether this process speaks for the job: it keeps OUTPUT/run.yaml and says in OUTPUT/launch.json that the run
        is on. One process of a job does, where several are started by hand."""
        return plan.variables.get("RANK", "0") == "0"

    @abstractmethod
    def start(self, run: Run, plan: LaunchPlan, words: Sequence[str] = TRAIN) -> int:
        """Do exactly what the plan says. Every process calls the function that `words` name first, with the others.
        Returns the exit status of the command."""

    # -- a run that was launched, maybe by another process -----------------------------------------------------------
    # These three suit a launcher whose `start` lasts as long as the job. One that submits has its own.

    def state(self, run: Run, record: JobRecord) -> State:
        """The state of the run, from the system that runs it. Errors: `RunError`, if that system cannot be asked."""
        state = job_record.state_of_process(record)
        if state.word == "gone":  # it may have left its status since the record was read
            state = job_record.state_of_process(job_record.read(run.folder) or record)
        return state

    def logs(self, run: Run, record: JobRecord, follow: bool) -> Iterator[str]:
        """Lines of its log, oldest first; with `follow` on until it has ended. Errors: `RunError`."""
        path = job_record.inside(run.folder / LOG, run.folder)
        return job_record.lines_of(path, follow, lambda: self.state(run, record).live)

    def stop(self, run: Run, record: JobRecord) -> str:
        """Ask it to save a checkpoint and end with status 75, and not to be started again by its scheduler. Returns at
        once, with what was done ("SIGTERM sent to process 12"); whoever called asks for the `state`. Errors:
        `RunError`."""
        return job_record.stop_process(record)


class SubmittedJob(Launcher):
    """A launcher that hands its job over to a scheduler or a service, shows the log until the job has ended, and asks
    them about it later. A subclass has `submit`, `label`, `state`, `logs` and `stop`."""

    plugin: ClassVar[str] = "launchers"
    submits = True
    every_s: ClassVar[float] = 10.0  # between questions about the job's state
    afterwards: ClassVar[str] = ""  # said of a job that `start` does not wait for: what comes after its end

    @abstractmethod
    def submit(self, run: Run, plan: LaunchPlan) -> JobRecord | None:
        """Hand the job over. None: this run's job is complete, and there is nothing to hand over. Errors: `RunError`;
        nothing is submitted then."""

    @abstractmethod
    def label(self, record: JobRecord) -> str:
        """What a message calls the job: `training job NAME`."""

    def waits(self, run: Run) -> bool:
        """Whether `start` returns when the job has ended; otherwise as soon as it is submitted."""
        return bool(self.options(run).wait)

    def complete(self, run: Run, record: JobRecord) -> None:
        """After a job that has trained to its end: fetch what it made, or say where that is. Errors: `RunError`."""

    def start(self, run: Run, plan: LaunchPlan, words: Sequence[str] = TRAIN) -> int:
        name = run.launch.name
        if tuple(words) != TRAIN:
            text = f"launch.name: {name} only trains; use launch.name=local to verify a few steps here"
            raise RunError("LS7383", text)
        record = self.submit(run, plan)
        if record is None:
            return 0
        job_record.write(run.folder, record)
        Console(True).say(f"{self.label(record)} is submitted, as asked for in {', '.join(plan.files)}")
        if self.waits(run):
            return self.watch(run, record)
        Console(True).say(f"lockstep status|logs|stop {shlex.quote(str(run.folder))} look after it{self.afterwards}")
        return 0

    def watch(self, run: Run, record: JobRecord) -> int:
        """Show the log of a submitted job, and wait for its end; an interrupt ends the showing, and not the job.
        Returns the exit status."""
        try:
            for line in self.logs(run, record, follow=True):
                Console(True).say(line)
        except KeyboardInterrupt:
            Console(True).say(
                f"the job goes on. lockstep logs {run.folder} shows it, lockstep stop {run.folder} ends it"
            )
            raise
        while (state := self.state(run, record)).live:
            time.sleep(self.every_s)
        if state.word == "done":
            self.complete(run, record)
        elif state.word == "stopped":
            Console(True).say(f"{self.label(record)} was stopped; the same command goes on from the last checkpoint")
        else:
            error(coded("LS7281", f"{self.label(record)} failed: {state.text or state.word}"))
        job_record.note(run.folder, status=state.status, ended=time.time())
        return 1 if state.status is None else int(state.status)


def write_files(plan: LaunchPlan) -> None:
    """The files of a plan, where it says. Errors: `RunError`."""
    try:
        for path, text in plan.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")
    except OSError as failure:
        raise RunError("LS7388", f"output: cannot write {failure.filename}: {failure.strerror}") from None
