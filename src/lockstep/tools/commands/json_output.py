"""`--json`: what a command says, as one JSON object of one shape for all commands (docs/commands.md).

In: facts, tables and notes. Out: a line of JSON on standard output. Numbers are numbers, not as a terminal rounds them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue

from lockstep.config.redaction import printable, redact_all


class Answer(BaseModel):
    """What `--json` prints; its JSON Schema is `Answer.model_json_schema()`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    command: str
    status: int  # the exit status
    facts: dict[str, JsonValue] = {}  # name -> value
    tables: dict[str, list[dict[str, JsonValue]]] = {}  # name -> rows, each an object by column
    notes: list[str] = []


def option(parser: argparse.ArgumentParser) -> None:
    """`--json`, for a command that prints a table."""
    parser.add_argument("--json", action="store_true", help="print one JSON object (docs/commands.md has its shape)")


def emit(
    command: str,
    status: int,
    facts: Mapping[str, Any] | None = None,
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    notes: Sequence[str] = (),
) -> int:
    """Print the object. Returns the status."""
    values = {"command": command, "status": status, "facts": facts or {}, "tables": tables or {}, "notes": notes}
    print(Answer.model_validate(redact_all(_finite(values), printable)).model_dump_json())
    return status


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity: they are null."""
    if isinstance(value, float):  # also numpy's float64
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
