"""Output of `evaluate` and `predict`."""

from __future__ import annotations


def numbers(text: str) -> dict[str, list[float]]:
    """Rows of the table."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    return {name: [float(value.replace(",", "")) for value in values] for name, *values in rows}
