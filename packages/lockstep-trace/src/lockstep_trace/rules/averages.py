"""Rules on models that track the trained one: weight averages, target networks, teachers. Evidence:
`tracer/averages.py`."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep_trace.read import Trace
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, Finding

NEAR = 0.12  # of one update


def follows(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a weight average that stays within a small part of one update of the trained model: its factors are
    swapped, so it takes nearly all of the new weights and almost none of the old ones.

    An average with decay d lags about d / (1 - d) updates behind the model; an exact copy has distance 0. A decay that
    ramps up from near 0 over thousands of steps also stays close in early steps, so the finding is never proved."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    rows: dict[str, list[tuple[int, float]]] = {}
    for number, step in sorted(rank.steps[optimizer].items()):
        for name, distance, update in step.averages or ():
            rows.setdefault(name, []).append((number, distance / update if update > 0 else 1.0))
    for name, ratios in rows.items():
        parts = [ratio for _, ratio in ratios]
        if len(parts) < PATIENCE or min(parts) < 1e-5 or max(parts) > NEAR:
            continue
        at = ratios[0][0]
        what = f"before step {at} {name} differs from the trained model by only {parts[0]:.2g} of the last update; in "
        what += f"{len(parts)} steps it nearly equals the model after each step"
        cause = "the factors are swapped: use average = decay * average + (1 - decay) * weights, with a decay near 1"
        otherwise = "a copy that is meant to follow immediately, or a decay that ramps up from near 0"
        decides = "how far the average is meant to lag behind the model"
        yield Finding("average-follows", what, cause, at, SUSPICIOUS, otherwise, decides)
