"""Rows of local files, prepared."""

from __future__ import annotations

from lockstep.config.run import Run
from lockstep.data.prepare import prepare
from lockstep.data.tokens import Prepared
from lockstep.tasks.classification import Classification


def prepared(run: Run) -> Prepared:
    return prepare(run, Classification)
