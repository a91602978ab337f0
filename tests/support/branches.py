"""Runs that start from another run's steps."""

from __future__ import annotations

from pathlib import Path

from lockstep.track.history import lines_of


def weights_of(output: Path) -> str:
    (line,) = [line for line in lines_of(output / "events.jsonl", ("event", "step")) if line["event"] == "finish"]
    return str(line["weights"])


def began_at(output: Path) -> list[int]:
    return [line["step"] for line in lines_of(output / "events.jsonl", ("event", "step")) if line["event"] == "start"]
