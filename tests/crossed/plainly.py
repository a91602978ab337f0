"""Compares what one process trained with lockstep's plain reference, which shares no code with it."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path

from crossed.broken import Finding

AVAILABLE = importlib.util.find_spec("lockstep.proof.against_plain") is not None


def compared(folder: Path) -> str:
    """Compare `folder/plain` and describe how much was compared. Errors: `Finding`."""
    if not AVAILABLE:
        return "no plain reference"
    if not (folder / "plain").exists():
        return "dropout that no entry of the config switches off"
    from lockstep.config.run import load
    from lockstep.data.job import Job
    from lockstep.proof.against_plain import compare_with_plain

    job = Job.of(load("run.yaml", ["output=alone"]))
    try:
        verdict = compare_with_plain(job, folder / "plain")
    except Exception as caught:
        raise Finding("the plain reference computes its steps", traceback.format_exc()) from caught
    if verdict.differences:
        raise Finding("equal to plain within rounding", "; ".join(verdict.differences[:4]))
    return f"{len(verdict.steps)} steps{f'; {verdict.uncovered}' if verdict.uncovered else ''}"
