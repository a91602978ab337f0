"""Content of a tracker's own store."""

from __future__ import annotations

import pytest

from lockstep.config import plugins


def there(name: str) -> None:
    """Skip the test if a tracker is not installed."""
    for package in plugins.find("track", name).packages:  # type: ignore[attr-defined]
        pytest.importorskip(package)


def numbers(step: int) -> dict[str, float]:
    return {"loss": 1 / step, "learning_rate": 0.5 / step, "grad_norm": float(step)}
