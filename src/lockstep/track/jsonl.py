"""`OUTPUT/metrics.jsonl`: one object a line, always written.

In: numbers. Out: lines; on a resume, those of steps that are trained again are dropped first.
"""

from __future__ import annotations

import json
import math
import os

from lockstep.run import Run
from lockstep.track.tracker import Tracker


class Jsonl(Tracker):
    """The record every other sink could be rebuilt from."""

    def __init__(self, run: Run, after: int) -> None:
        super().__init__(run, after)
        path = run.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if _step(line) <= after] if after else []
        self._kept = {(line["step"], line["split"]) for line in map(json.loads, kept)}
        aside = path.with_name(".metrics.jsonl.partial")
        aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(aside, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open for the whole run

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        if (step, split) in self._kept:  # scored again by a run that was killed between its last step and its export
            return
        plain = {k: v if math.isfinite(v) else None for k, v in numbers.items()}  # JSON has no word for them
        self._file.write(json.dumps({"step": step, "split": split, **plain}) + "\n")
        self._file.flush()

    def show(self, step: int, samples: list[str]) -> None:
        """`OUTPUT/samples.jsonl`, for reading: lines of steps that are trained again stay."""
        if samples:
            with open(self.run.folder / "samples.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "samples": samples}, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.close()


def _step(line: str) -> float:
    """The step of a line; infinite for half a line, which a kill may have left."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
