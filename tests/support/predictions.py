"""Output of `evaluate` and `predict`."""

from __future__ import annotations


def numbers(text: str) -> dict[str, list[float]]:
    """Rows of the table."""
    lines = text.splitlines()
    rows = [line.split() for line in lines[lines.index("scores") + 2 :]] if "scores" in lines else []
    return {name: [float(value.replace(",", "")) for value in values] for name, *values in rows}
