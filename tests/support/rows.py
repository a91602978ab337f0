"""Prepared rows of local files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.config.run import Run
from lockstep.data.arrow_cache import Prepared
from lockstep.data.prepare import prepare
from lockstep.tasks.classification import Classification
from support.harness import tiny


def prepared(run: Run) -> Prepared:
    return prepare(run, Classification)


def run_of(path: Path, *overrides: str, **values: Any) -> Run:
    return tiny(*overrides, data={"source": str(path), "max_length": 32}, **values)
