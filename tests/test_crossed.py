"""Runs that were drawn, of one seed, and the smallest forms of those that once broke a promise (CONTRIBUTING.md)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from crossed import draw
from crossed.job import Job, job_of
from crossed.process import judged
from crossed.shrink import CASES

pytestmark = pytest.mark.processes

SEED, COUNT = 20261124, 40
DRAWN = list(itertools.islice(draw.cases(SEED), COUNT))
WRITTEN = sorted(CASES.glob("*.yaml"))


@pytest.mark.parametrize("number", range(COUNT))
def test_a_drawn_run_is_refused_or_as_promised(number: int) -> None:
    verdict = judged(DRAWN[number])
    assert verdict.outcome in ("promised", "refused"), (
        f"{verdict.promise}: {verdict.seen}\n{job_of(DRAWN[number]).dump()}"
    )


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_what_once_broke_a_promise(path: Path) -> None:
    verdict = judged(Job.load(path.read_text(encoding="utf-8")))
    assert verdict.outcome in ("promised", "refused"), f"{verdict.promise}: {verdict.seen}"
