"""The best step according to the files of a run."""

from __future__ import annotations

import json
from pathlib import Path


def losses_by_step(output: Path, split: str = "validation") -> dict[int, float]:
    """Step -> loss."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["split"] == split}
