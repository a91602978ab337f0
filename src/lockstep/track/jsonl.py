"""`OUTPUT/metrics.jsonl`, `system.jsonl` and `samples.jsonl`: one object a line, always written.

In: numbers and samples. Out: lines. After a resume, the first new line replaces the old lines of repeated steps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from lockstep.config.output_files import open_file, redirected, replacing
from lockstep.track.tracker import End, Sample, Tracker


class Jsonl(Tracker):
    """The complete record, from which every other sink could be rebuilt."""

    def open(self) -> str:
        self._metrics, self._system, self._samples = (
            Lines(self.run.folder / f"{name}.jsonl", self.after) for name in ("metrics", "system", "samples")
        )
        return str(self.run.folder / "metrics.jsonl")

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        plain = {k: v if math.isfinite(v) else None for k, v in numbers.items()}  # JSON cannot express them
        lines = self._system if split == "system" else self._metrics
        lines.add({"step": step, "split": split, **plain})

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Write samples to `OUTPUT/samples.jsonl`."""
        if samples:
            self._samples.add({"step": step, "split": "validation", "samples": list(samples)})

    def close(self, end: End) -> None:
        for lines in (self._metrics, self._system, self._samples):
            lines.close()


class Lines:
    """A file of JSON objects, one per line. Lines that cannot be written are retried with the next one. Old content is
    replaced only when a new line is written."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self._after = path.parent.resolve() / path.name, after
        self._queue: list[dict[str, Any]] = []  # not yet compared with the file
        self._waiting = b""
        self._lines: dict[tuple[int, str | None], bytes] | None = None  # by step and split; None until the file is read
        self._stale = False  # the file has lines to drop
        self._file: IO[bytes] | None = None

    def add(self, values: dict[str, Any]) -> None:
        """Add a line. Errors: `OSError` if this and earlier queued lines could not be written yet."""
        self._queue.append(values)
        self._write()

    def _read(self) -> dict[tuple[int, str | None], bytes]:
        """Return the lines of steps that are not repeated. Errors: `OSError`."""
        try:
            old = self.path.read_bytes()
        except FileNotFoundError:
            old = b""
        lines: dict[tuple[int, str | None], bytes] = {}
        for line in old.split(b"\n"):  # not splitlines: JSON does not escape U+2028
            where = _where(line)
            if where is not None and where[0] <= self._after and self._after:
                lines.setdefault(where, line)
        self._stale = old != b"".join(line + b"\n" for line in lines.values())
        return lines

    def _write(self) -> None:
        if self._file is not None and self._replaced():
            self._file.close()
            self._file = None
        if self._file is None and (fault := redirected(self.path.parent)) is not None:
            raise OSError(fault)
        if self._queue and self._lines is None:
            self._lines = self._read()
        for values in self._queue:
            if (values["step"], values.get("split")) not in (self._lines or {}):
                # otherwise a duplicate, from a run killed between its last step and its export
                self._waiting += (json.dumps(values, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        self._queue = []
        if self._stale and self._waiting and self._lines is not None:
            with replacing(self.path) as aside:
                aside.write_bytes(b"".join(line + b"\n" for line in self._lines.values()))
            self._stale = False
        if self._file is None and self._waiting:
            self._file = open_file(self.path, "ab", buffering=0)
        while self._file is not None and self._waiting:  # a full disk may write a part of a line
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def _replaced(self) -> bool:
        """Return whether the open file was deleted or replaced by another one or a link. A moved file is written on."""
        assert self._file is not None
        ours = os.fstat(self._file.fileno())
        try:
            return not os.path.samestat(os.lstat(self.path), ours)
        except OSError:
            return ours.st_nlink == 0 and self.path.parent.is_dir()

    def close(self) -> None:
        self._write()
        if self._file is not None:
            self._file.close()


def _where(line: bytes) -> tuple[int, str | None] | None:
    """Return step and split of a line, or None for an incomplete or invalid line, after a kill or a full disk."""
    try:
        values = json.loads(line)
        return int(values["step"]), values.get("split")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
