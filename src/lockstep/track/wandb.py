"""Weights & Biases: one run for all ranks, continued when training resumes.

In: numbers and samples. Out: a W&B run with `train/...`, `eval/...` and `system/...` against the step, the resolved run
as its config, a table of samples. The key comes from `WANDB_API_KEY` or `wandb login`; without one, or without a
network, the run is kept in `OUTPUT/wandb`, from where `wandb sync` sends it later. Needs the extra
`lockstep-train[wandb]`.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lockstep.config.output_files import FolderInside
from lockstep.config.redaction import one_line
from lockstep.config.run import Run
from lockstep.config.sections import Section
from lockstep.track import wandb_file
from lockstep.track.tracker import End, Sample, Tracker, named
from lockstep.track.wandb_file import HEADER

SECONDS_TO_CONNECT = 30.0


class WandB(Tracker):
    """Tracker for Weights & Biases. Imports are absolute, so `import wandb` here loads the package, not this file."""

    packages = ("wandb",)

    class Options(Section):
        project: str = Field("lockstep", description="W&B project")
        entity: str | None = Field(None, description="W&B user or team; default: the account's own")
        group: str | None = Field(None, description="runs that belong together, such as the seeds of one experiment")
        name: str | None = Field(None, description="name of the run in W&B; default: the run's name")
        tags: list[str] = Field(default_factory=list, description="tags of the run")
        notes: str | None = Field(None, description="a longer description")
        mode: Literal["online", "offline"] | None = Field(
            None, description="offline: keep the run in OUTPUT/wandb, for `wandb sync`; default: $WANDB_MODE or online"
        )

    def __init__(self, run: Run, options: Any, after: int, run_id: str | None) -> None:
        # chosen here, because `open` takes seconds and a checkpoint written before it returns must hold the id
        super().__init__(run, options, after, run_id or secrets.token_hex(4))
        self._resumes = run_id is not None
        self._place = FolderInside(run.folder, "wandb")

    def open(self) -> str:
        self._refuse_link()
        if self.after and self._resumes and (fault := self._place.not_of_run(f"*run-*-{self.run_id}")) is not None:
            raise OSError(fault)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # do not send error reports
        import wandb

        wandb.setup(wandb.Settings(silent=True))  # only the console writes to the terminal
        self._rows: list[list[Any]] = []
        mode = self.options.mode or os.environ.get("WANDB_MODE") or "online"
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            self._start(wandb, "offline")
            return f"no API key (WANDB_API_KEY); {self._offline_note()}"
        try:
            self._start(wandb, mode)
        except wandb.errors.CommError as caught:
            wandb.teardown()  # otherwise its background process keeps the run's id
            self._start(wandb, "offline")
            return f"{one_line(caught, 200)}; {self._offline_note()}"
        return self._wandb.url or self._offline_note()

    def _offline_note(self) -> str:
        own = Path(self._wandb.dir).parent
        there = [file.parent for file in self._files()]  # one per process; a file without a record cannot be sent
        unsent = [folder for folder in there if folder != own and not any(folder.glob("*.wandb.synced"))]
        # in sequence: the steps of a run must be sent in order
        command = " && ".join(f"wandb sync {shlex.quote(str(folder))}" for folder in [*unsent, own])
        return f"run {self.run_id} is kept on disk; send it with: {command}"

    def _files(self) -> list[Path]:
        """Files of the offline processes of this run that hold a record, in order."""
        folders = sorted((self.run.folder / "wandb").glob(f"offline-run-*-{self.run_id}"))  # named by time
        return [file for folder in folders for file in folder.glob("*.wandb") if file.stat().st_size > HEADER]

    def _start(self, wandb: Any, mode: str) -> None:
        if mode == "offline" and self.after:
            self.stored = wandb_file.last_step(self._files())
        options = self.options
        self._wandb: Any = wandb.init(
            project=options.project,
            entity=options.entity,
            group=options.group,
            name=options.name or self.run.name,
            tags=options.tags or None,
            notes=options.notes,
            config=self.config,
            dir=str(self.run.folder),
            id=self.run_id,
            resume="allow",
            mode=mode,
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=SECONDS_TO_CONNECT,
                finish_timeout=self.run.track.close_timeout_s,
                disable_git=True,  # do not send a diff of the working tree
                disable_code=True,
                x_disable_stats=True,  # only this process; `system/...` has every rank
            ),
        )

    def _refuse_link(self) -> None:
        """Raise `OSError` if the run's folder now links elsewhere: W&B opens its files by name."""
        if (fault := self._place.redirected()) is not None:
            raise OSError(fault)

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        self._refuse_link()
        self._wandb.log(named(split, numbers), step=step)

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Log one table for the whole run, extended by each evaluation."""
        self._refuse_link()
        import wandb

        columns: list[str | int] = ["step", *samples[0]]
        self._rows += [[step, *sample.values()] for sample in samples]
        self._wandb.log({"eval/samples": wandb.Table(columns=columns, data=self._rows)}, step=step)

    def close(self, end: End) -> None:
        if end == "stopped":
            self._wandb.mark_preempting()
        self._wandb.finish(exit_code=0 if end == "done" else 1)
