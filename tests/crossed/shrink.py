"""Reduces a failing case to the fewest special features with which it still fails alike, and saves it as a test.

In: a case that broke a promise. Out: the smallest case, and a file in `cases/`, which `test_crossed.py` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from crossed import draw
from crossed.job import job_of
from crossed.judge import Verdict

CASES = Path(__file__).parent / "cases"


def shrink(case: draw.Case, verdict: Verdict, judged: Callable[[draw.Case], Verdict]) -> tuple[draw.Case, Verdict]:
    """Reset features that the failure does not need to their plainest values: half of them at a time, finally one by
    one. `judged`: runs a case. Returns the reduced case and its verdict."""
    size = len(case) // 4
    while True:
        smaller, plain = False, draw.plainest(case)
        others = [feature for feature in case if case[feature] != plain[feature]]
        for start in range(0, len(others), size):
            plain = draw.plainest(case)
            trial = case | {feature: plain[feature] for feature in others[start : start + size]}
            found = judged(trial)
            if (found.outcome, found.promise) == ("finding", verdict.promise):
                case, verdict, smaller = trial, found, True
        if size == 1 and not smaller:
            return case, verdict
        size = max(1, size // 2)


def special(case: draw.Case) -> draw.Case:
    """Return the features of a case that differ from the plainest ones, with its task and family."""
    plain = draw.plainest(case)
    return {name: value for name, value in case.items() if name in ("task", "family") or value != plain[name]}


def written(case: draw.Case, verdict: Verdict, name: str, folder: Path = CASES) -> Path:
    """Write a case to a file: its job as YAML, and the promise that it broke. Returns the path."""
    seen = " ".join(verdict.seen.split())[-300:]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    head = [f"# Broke: {verdict.promise}", f"# Seen: {seen}", f"# Features: {special(case)}"]
    path.write_text("\n".join([*(line[:200] for line in head), job_of(case).dump()]), encoding="utf-8")
    return path
