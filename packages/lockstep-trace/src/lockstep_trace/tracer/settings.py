"""Settings of a traced process, in a file next to `sitecustomize.py`: some launchers drop environment variables. Numbers
that records and their readers share. Imports no torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LEVELS = ("losses", "gradients", "modules", "operations")
CHECKED = (1, 10)  # steps that --check recomputes if none is given
WIDTHS = (257, 263, 269, 271, 277, 281, 283, 293)  # of sketches


def width_of(shape: Sequence[int]) -> int:
    """Return the number of a sketch's buckets: the first prime of `WIDTHS` that divides no dimension.

    If P divided the row length of a matrix, elements of a column would share a bucket."""
    return _width_of(tuple(shape))


@functools.lru_cache(maxsize=4096)
def _width_of(shape: tuple[int, ...]) -> int:
    return next((p for p in WIDTHS if all(n % p for n in shape if n)), WIDTHS[-1])


def clipping_factor(limit: float, norm: float) -> float:
    """Return the factor by which `clip_grad_norm_` multiplies; NaN if the norm is NaN."""
    return limit / (norm + 1e-6) if not limit / (norm + 1e-6) >= 1.0 else 1.0


@dataclass(frozen=True)
class Settings:
    """Settings of the recorder. `folder`: folder of the trace. `every`: measure each N-th step. `steps`: stop after
    this many steps; None: never. `perturb`: flip the last bit of half of the weights before the first forward pass.
    `replace`: replace the contents that an earlier run left in the folder; False if a command has prepared it. `check`:
    steps of each optimizer to recompute on copies. `step`: the step whose operations are recorded at the level
    `operations`; None: 0."""

    folder: str
    every: int = 1
    steps: int | None = None
    level: str = "gradients"
    perturb: bool = False
    replace: bool = False
    check: tuple[int, ...] = ()
    step: int | None = None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "check": tuple(values.get("check", ()))})
