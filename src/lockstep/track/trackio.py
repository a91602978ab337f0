"""Trackio: a run in a local store, or in a Hugging Face Space.

In: numbers and samples. Out: a Trackio run with `train/...`, `eval/...` and `system/...` against the step, the resolved
run as its config, a table of samples. The store is `$TRACKIO_DIR`, by default in Hugging Face's cache; a Space needs
`HF_TOKEN`. Needs the extra `lockstep-train[trackio]`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from lockstep.config.run import Run
from lockstep.config.sections import Section
from lockstep.track.tracker import End, Sample, Tracker, named


class Trackio(Tracker):
    """Tracker for Trackio. View: `trackio show --project PROJECT`. A resumed run continues by its name."""

    packages = ("trackio",)

    class Options(Section):
        project: str = Field("lockstep", description="Trackio project")
        group: str | None = Field(None, description="runs that belong together")
        name: str | None = Field(None, description="name of the run in Trackio; default: the run's name and the time")
        space: str | None = Field(None, description="USER/SPACE on the Hub to log to; default: the local store")
        private: bool = Field(True, description="create the Space private")

    def __init__(self, run: Run, options: Any, after: int, run_id: str | None) -> None:
        # chosen here, because `open` takes seconds and a checkpoint written before it returns must hold the name
        name = run_id or options.name or f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        super().__init__(run, options, after, name)

    def open(self) -> str:
        import trackio
        from trackio import deploy, run, utils

        for module in (trackio, deploy, run, utils):
            module.print = _silent  # type: ignore[attr-defined]  # only the console writes to the terminal
        options = self.options
        self._trackio: Any = trackio.init(
            project=options.project,
            name=self.run_id,
            group=options.group,
            space_id=options.space,
            private=options.private if options.space else None,
            config=self.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # only this process; `system/...` has every rank
            auto_log_cpu=False,
        )
        self._last_step = self._trackio._next_step - 1  # last step of a continued run
        self.stored = self._last_step if self.after else None
        self._there = self._names_at_last_step() if self.after and options.space is None else set()
        self._rows: list[dict[str, Any]] = []
        where = f"https://huggingface.co/spaces/{options.space}" if options.space else str(utils.TRACKIO_DIR)
        return f"run {self.run_id} in {where}; trackio show --project {options.project}"

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        if self.after and step < self._last_step:
            return  # a repeated step: the stored values stay
        there = self._there if step == self._last_step else set()  # a kill may have left a part of the last step
        if values := {name: value for name, value in named(split, numbers).items() if name not in there}:
            self._trackio.log(values, step=step)

    def _names_at_last_step(self) -> set[str]:
        """Names that the local store holds of the last step of a continued run."""
        from trackio.sqlite_storage import SQLiteStorage

        lines = SQLiteStorage.get_logs(self.options.project, self.run_id)
        return {name for line in lines if line.get("step") == self._last_step for name in line}

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Log one table for the whole run, extended by each evaluation."""
        import pandas
        import trackio

        self._rows += [{"step": step, **sample} for sample in samples]
        self._trackio.log({"eval/samples": trackio.Table(dataframe=pandas.DataFrame(self._rows))}, step=step)

    def close(self, end: End) -> None:
        self._trackio.finish()


def _silent(*words: Any, **options: Any) -> None:
    pass
