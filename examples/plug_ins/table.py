"""`OUTPUT/metrics.csv`: one number a line, for a spreadsheet.

In: numbers. Out: lines `step,name,value`; on a resume, those of steps that are trained again are dropped first.
"""

from __future__ import annotations

import csv

from pydantic import Field

from lockstep.config.sections import Section
from lockstep.track.tracker import End, Tracker, named


class Table(Tracker):
    """The long form of `metrics.jsonl`."""

    class Options(Section):
        precision: int = Field(6, ge=1, description="digits of a number")

    def open(self) -> str:
        path = self.run.folder / "metrics.csv"
        kept: list[list[str]] = []
        if self.after and path.exists():
            with open(path, encoding="utf-8", newline="") as old:
                kept = [row for row in csv.reader(old) if int(row[0]) <= self.after]
        self._file = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115 - open for the whole run
        self._rows = csv.writer(self._file)
        self._rows.writerows(kept)
        return str(path)

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        digits = self.options.precision
        self._rows.writerows([step, name, f"{value:.{digits}g}"] for name, value in named(split, numbers).items())
        self._file.flush()

    def close(self, end: End) -> None:
        self._file.close()
