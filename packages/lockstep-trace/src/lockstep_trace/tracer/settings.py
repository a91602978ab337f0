"""Settings of a traced process, in a file next to `sitecustomize.py`: some launchers drop environment variables."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LEVELS = ("losses", "gradients", "modules", "operations")
CHECKED = (1, 10)  # steps that --check recomputes if none is given


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
