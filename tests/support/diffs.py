"""Output of `lockstep diff` for two runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main

ONE = ("strategy.name=single", "launch.processes=1", "steps=9", "checkpoint.every=4", "checkpoint.keep=5")


def diff_output(a: Path, b: Path, capfd: pytest.CaptureFixture[str], *words: str, status: int = 1) -> str:
    capfd.readouterr()
    assert main(["diff", str(a), str(b), *words]) == status
    return " ".join(capfd.readouterr().out.split())
