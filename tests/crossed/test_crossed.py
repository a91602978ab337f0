"""Runs drawn from one seed, and the reduced forms of those that once broke a promise (tests/README.md)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from crossed import draw
from crossed.job import Job, job_of
from crossed.judge import Verdict
from crossed.process import judged
from crossed.shrink import CASES, shrink, special, written
from support.marks import long

pytestmark = pytest.mark.processes

# Fault -> the promise that it breaks, and features of a case in which it shows.
PLANTED: dict[str, tuple[str, dict[str, object]]] = {
    "late_rate": ("equal to plain within rounding", {"schedule": "constant", "warmup": 2}),
    "dropout_of_a_rank": ("the bits of one process", {"dropout": True}),
    "leaves_from_left_to_right": ("the bits of one process", {"leaves": 4, "second": ("fsdp2 tensor", 2)}),
    "pieces_by_threads": ("the bits of one process", {"exact": "portable", "threads": 2}),
    "forgotten_moments": ("the bits of one process", {}),
    "forgotten_clip": ("equal to plain within rounding", {"clip": 0.05, "optimizer": "sgd"}),
    "unread_mask": ("an accepted run trains", {"padding": "batch"}),  # the comparison before the first step ends it
    "unscored_row": ("an evaluation scores each example once", {}),
    "late_refusal": (
        "an unsupported run is refused before processes start",
        {"average": "ema", "second": ("zero2", 2)},
    ),
}
SEED, COUNT = 20261126, 5  # `make crossed` runs any number, and 2,000 are recorded as promised
DRAWN = list(itertools.islice(draw.cases(SEED), COUNT))
WRITTEN = sorted(CASES.glob("*.yaml"))


@pytest.mark.parametrize("number", range(COUNT))
def test_random_runs_keep_the_promise_or_are_refused(number: int) -> None:
    verdict = judged(DRAWN[number])
    assert verdict.outcome in ("promised", "refused"), (
        f"{verdict.promise}: {verdict.seen}\n{job_of(DRAWN[number]).dump()}"
    )


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(fault: str) -> None:
    promise, features = PLANTED[fault]
    verdict = judged(draw.plainest({"task": "classification"}) | features, plant=fault)
    assert (verdict.outcome, verdict.promise) == ("finding", promise), verdict.seen


def test_minimal_run_keeps_the_promise() -> None:
    """Control: without an injected fault, the plainest run keeps all promises."""
    verdict = judged(draw.plainest({"task": "classification"}) | {"warmup": 2})
    assert (verdict.outcome, verdict.bits, verdict.plain) == ("promised", True, "5 steps"), verdict.seen


def test_a_failing_case_is_reduced_to_the_features_it_needs(tmp_path: Path) -> None:
    """A case with 15 features that are not the plainest shrinks to an optimizer with a schedule."""

    def fails(case: draw.Case) -> Verdict:
        wrong = case["optimizer"] == "muon" and case["schedule"] == "wsd"
        return Verdict("finding", "bits", "these differ") if wrong else Verdict("promised")

    case = DRAWN[0] | {"optimizer": "muon", "schedule": "wsd", "shape": "unicode", "clip": None, "stop": 3}
    smallest, verdict = shrink(case, fails(case), fails)
    assert special(smallest) == {
        "task": case["task"],
        "family": draw.plainest(case)["family"],
        "optimizer": "muon",
        "schedule": "wsd",
    }
    path = written(smallest, verdict, "found", tmp_path)
    assert Job.load(path.read_text(encoding="utf-8")) == job_of(smallest)


def test_a_seed_and_a_number_are_a_case() -> None:
    again = list(itertools.islice(draw.cases(SEED), 3))
    assert again == DRAWN[:3]
    assert next(draw.cases(SEED + 1)) != DRAWN[0]


def test_draws_respect_fixed_values() -> None:
    tasks = [case["task"] for case in itertools.islice(draw.cases(SEED, {"task": ["module", "classification"]}), 12)]
    assert set(tasks) == {"module", "classification"}
    assert draw.never_drawn({"task": ["module", "modul"], "adapter": ["lora"]}) == ["task=modul"]


# CI runs every third one.
@pytest.mark.parametrize("path", [long(p) if i % 3 else p for i, p in enumerate(WRITTEN)], ids=lambda path: path.stem)
def test_jobs_that_once_broke_the_promise(path: Path) -> None:
    verdict = judged(Job.load(path.read_text(encoding="utf-8")))
    assert verdict.outcome in ("promised", "refused"), f"{verdict.promise}: {verdict.seen}"
