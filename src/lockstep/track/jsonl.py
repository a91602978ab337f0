"""`OUTPUT/metrics.jsonl`, `system.jsonl` and `samples.jsonl`: one object a line, always written.

In: numbers and samples. Out: lines; on a resume, those of steps that are trained again are dropped first.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from lockstep.track.tracker import End, Sample, Tracker


class Jsonl(Tracker):
    """The record every other sink could be rebuilt from."""

    def open(self) -> str:
        self._metrics, self._system, self._samples = (
            _Lines(self.run.folder / f"{name}.jsonl", self.after) for name in ("metrics", "system", "samples")
        )
        return str(self.run.folder / "metrics.jsonl")

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        plain = {k: v if math.isfinite(v) else None for k, v in numbers.items()}  # JSON has no word for them
        lines = self._system if split == "system" else self._metrics
        lines.add({"step": step, "split": split, **plain})

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """`OUTPUT/samples.jsonl`, for reading."""
        if samples:
            self._samples.add({"step": step, "split": "validation", "samples": list(samples)})

    def close(self, end: End) -> None:
        for lines in (self._metrics, self._system, self._samples):
            lines.close()


class _Lines:
    """A file of JSON objects. What the disk does not take is kept, and tried again with the next line."""

    def __init__(self, path: Path, after: int) -> None:
        self.path = path
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        kept = [line for line in old.splitlines() if _step(line) <= after] if after else []
        self._kept = {(line["step"], line.get("split")) for line in map(json.loads, kept)}
        self._begin = "".join(f"{line}\n" for line in kept)
        self._stale = old != self._begin  # the file holds more than what is kept
        self._waiting = b""
        self._file: FileIO | None = None
        with suppress(OSError):  # tried again, and told, with the first line
            self._write()

    def add(self, values: dict[str, Any]) -> None:
        """Errors: `OSError`, when the line and those before it could not be written yet."""
        if (values["step"], values["split"]) in self._kept:
            return  # scored again by a run that was killed between its last step and its export
        self._waiting += (json.dumps(values, ensure_ascii=False) + "\n").encode()
        self._write()

    def _write(self) -> None:
        if self._stale:
            aside = self.path.with_name(f".{self.path.name}.partial")
            aside.write_text(self._begin, encoding="utf-8")
            os.replace(aside, self.path)
            self._stale = False
        if self._file is None and self._waiting:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open for the whole run
        while self._file is not None and self._waiting:  # a full disk may take a part of a line
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        self._write()
        if self._file is not None:
            self._file.close()


def _step(line: str) -> float:
    """The step of a line; infinite for half a line, which a kill may have left."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
