"""Rules on copies of a model that follow it: averages, targets, teachers. Evidence: `tracer/averages.py`."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep_trace.read import Trace
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, Finding

NEAR = 0.12  # of one update


def follows(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report an average that differs from the trained model by a small part of one step's update: its factors are
    swapped, so that it takes nearly all of the new weights and next to nothing of the old ones.

    An average with a decay of d is d / (1 - d) updates or so behind the model, and an exact copy is at no distance.
    Decays that begin near 0, as with a ramp over thousands of steps, follow as closely in early steps, so it is never
    proved."""
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
        what = f"before step {at} {name} differs from the trained model by {parts[0]:.2g} of the last update, as in "
        what += f"{len(parts)} steps: after each step it is nearly the model itself"
        cause = "average = decay * average + (1 - decay) * weights, with a decay near 1: the factors are swapped"
        otherwise = "a copy that is meant to follow at once, or a decay that begins near 0 and grows"
        decides = "how far behind the model it is meant to be"
        yield Finding("average-follows", what, cause, at, SUSPICIOUS, otherwise, decides)
