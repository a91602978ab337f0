"""Prepared data of a small run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.data.arrow_cache import Columns, Prepared
from lockstep.data.prepare import prepare


def prepared(run: Run, said: list[str] | None = None) -> Prepared:
    tell = said.append if said is not None else None
    return prepare(run, plugins.find("tasks", run.task.name), tell=tell)  # type: ignore[type-abstract]


def token_rows(found: Prepared) -> dict[str, list[list[int]]]:
    """Tokens of every split."""
    splits = {split: Columns(path).ragged("input_ids") for split, path in found.splits.items()}
    return {split: [ids.row(i).tolist() for i in range(len(ids.lengths))] for split, ids in splits.items()}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
