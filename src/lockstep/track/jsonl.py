"""`OUTPUT/metrics.jsonl`, `system.jsonl` and `samples.jsonl`: one object a line, always written.

In: numbers and samples. Out: lines; on a resume, those of steps that are trained again are dropped with the first new
line, and not before there is one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from lockstep.config.run import led_away
from lockstep.track.tracker import End, Sample, Tracker


class Jsonl(Tracker):
    """The record every other sink could be rebuilt from."""

    def open(self) -> str:
        self._metrics, self._system, self._samples = (
            Lines(self.run.folder / f"{name}.jsonl", self.after) for name in ("metrics", "system", "samples")
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


class Lines:
    """A file of JSON objects. What the disk does not take is kept, and tried again with the next line. What the file
    held before stays until there is a line to put there."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self._after = path.parent.resolve() / path.name, after
        self._queue: list[dict[str, Any]] = []  # not looked at yet
        self._waiting = b""
        self._lines: dict[tuple[int, str | None], bytes] | None = None  # by step and split, once the file was read
        self._stale = False  # the file holds more than what is kept
        self._file: FileIO | None = None

    def add(self, values: dict[str, Any]) -> None:
        """Errors: `OSError`, when the line and those before it could not be written yet."""
        self._queue.append(values)
        self._write()

    def _read(self) -> dict[tuple[int, str | None], bytes]:
        """The lines of steps that are not trained again. Errors: `OSError`."""
        try:
            old = self.path.read_bytes()
        except FileNotFoundError:
            old = b""
        lines: dict[tuple[int, str | None], bytes] = {}
        for line in old.split(b"\n"):  # JSON escapes this, and leaves U+2028 as it is
            where = _where(line)
            if where is not None and where[0] <= self._after and self._after:
                lines.setdefault(where, line)
        self._stale = old != b"".join(line + b"\n" for line in lines.values())
        return lines

    def _write(self) -> None:
        if self._file is None and (fault := led_away(self.path.parent)) is not None:
            raise OSError(fault)
        if self._queue and self._lines is None:
            self._lines = self._read()
        for values in self._queue:
            if (values["step"], values.get("split")) not in (self._lines or {}):
                # else scored again by a run that was killed between its last step and its export
                self._waiting += (json.dumps(values, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        self._queue = []
        if self._stale and self._waiting and self._lines is not None:
            aside = self.path.with_name(f".{self.path.name}.partial")
            aside.write_bytes(b"".join(line + b"\n" for line in self._lines.values()))
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


def _where(line: bytes) -> tuple[int, str | None] | None:
    """Step and split of a line; None for half a line and for bytes that are no text, as kills and full disks leave."""
    try:
        values = json.loads(line)
        return int(values["step"]), values.get("split")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
