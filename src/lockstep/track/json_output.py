"""`--json`: the output of a command as one JSON object, of the same schema for all commands
(docs/reference/commands.md).

In: facts, tables and notes. Out: one line of JSON on standard output. Other output of the command and of its child
processes goes to standard error.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue

from lockstep.config.redaction import redact_all
from lockstep.track.console import LOG, RECORD, Record
from lockstep_trace import streams
from lockstep_trace.redaction import printable


class Answer(BaseModel):
    """Output of `--json`; its JSON Schema is `Answer.model_json_schema()`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    command: str
    status: int  # exit status
    facts: dict[str, JsonValue] = {}  # name -> value
    tables: dict[str, list[dict[str, JsonValue]]] = {}  # name -> rows, each an object by column
    notes: list[str] = []


@contextmanager
def recording(command: str) -> Iterator[Callable[[int], int]]:
    """Record console output, and send all other output to standard error. Yields a function that takes the exit status,
    prints the object, and returns the status."""
    record = Record()
    token = RECORD.set(record)
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)

    def back() -> None:
        sys.stdout.flush()
        os.dup2(stdout, 1)

    def finish(status: int) -> int:
        back()
        return emit(command, status, record.facts, record.tables, record.notes)

    try:
        yield finish
    finally:
        back()
        os.close(stdout)
        RECORD.reset(token)


def log_end(folder: Path) -> int:
    """Size in bytes of an output folder's log before a command appends to it."""
    try:
        return (folder / LOG).stat().st_size
    except OSError:
        return 0


def of_training(status: int, folder: Path, logged: int) -> int:
    """Add training results to the JSON object, if one is requested: notes of other ranks, and, for a finished run, its
    scores and the hashes of the exported files. `logged`: `log_end` before training. Returns the status."""
    record, scores, export = RECORD.get(), folder / "scores.json", folder / "export.json"
    if record is None:
        return status
    with suppress(OSError), open(folder / LOG, "rb") as log:
        log.seek(logged)
        notes = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.startswith("note: ")]
        record.notes += [note for note in dict.fromkeys(notes) if note not in record.notes]
    if status or not scores.is_file():
        return status
    report = json.loads(scores.read_text(encoding="utf-8"))
    record.facts |= {"output": str(folder), "step": report["step"], "export": report["export"]}
    record.facts |= {"sha256": json.loads(export.read_text(encoding="utf-8"))} if export.is_file() else {}
    record.tables["scores"] = [{"split": split} | numbers for split, numbers in report["splits"].items()]
    return status


def emit(
    command: str,
    status: int,
    facts: Mapping[str, Any] | None = None,
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    notes: Sequence[str] = (),
) -> int:
    """Print the object. Returns the status."""
    values = {"command": command, "status": status, "facts": facts or {}, "tables": tables or {}, "notes": notes}
    answer = Answer.model_validate(redact_all(_finite(values), printable))
    line = answer.model_dump_json()
    print(line if streams.encodes(sys.stdout, line) else json.dumps(answer.model_dump()))
    return status


def _finite(value: Any) -> Any:
    """Replace nan and infinity by null, because JSON lacks them."""
    if isinstance(value, float):  # also numpy's float64
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
