"""What came of a comparison of two traces, as `diff` and `verify` say it, and its page.

In: `Comparison`s and traces. Out: lines on the terminal, and `report.html`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.config.run import RunError
from lockstep.trace.compare import COLUMNS, Comparison, row_cells
from lockstep.trace.errors import TraceError
from lockstep.trace.findings import Finding
from lockstep.trace.page import values_of
from lockstep.trace.read import read
from lockstep.track.console import Console

ROWS = 12  # of a table


@contextmanager
def refusing() -> Iterator[None]:
    """`TraceError` as `RunError`."""
    try:
        yield
    except TraceError as error:
        raise RunError(error.code, error.message) from None


def say_numbers(console: Console, verdict: Comparison, title: str = "") -> None:
    """The table of the steps that were compared, up to the first difference, and where they are furthest apart."""
    rows = verdict.rows
    rows_shown = rows if len(rows) <= ROWS else (*rows[: ROWS // 2], *rows[-ROWS // 2 :])
    if not rows_shown:
        return
    cells = [row_cells(row) for row in rows_shown]
    console.table(title, COLUMNS, cells, key="steps")
    for what, of in (("gradient", "gradient_of"), ("update", "update_of")):
        row = max(rows, key=lambda r: _size(getattr(r, what)))
        if getattr(row, of):
            name = "gradients" if what == "gradient" else "changes"
            console.say(f"{name} are furthest apart in {getattr(row, of)} (step {row.step})")


def _size(value: float | None) -> float:
    return -1.0 if value is None else math.inf if math.isnan(value) else value


def lines_of(verdict: Comparison) -> list[str]:
    """The first difference, and its likely cause; none where nothing differs beyond what may."""
    if verdict.first is None:
        return []
    at = "before the first step" if verdict.step is None else f"in step {verdict.step}"
    head = f"they part {at}, in the {verdict.first}:"
    return [head, *(f"  {line}" for line in verdict.lines), f"  likely: {verdict.cause}"]


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding and one for what to change."""
    return [line for each in findings for line in (f"[{each.code}] {each.what}", f"    {each.cause}")]


def page(folder: Path, reference: Path | None = None, verdicts: Sequence[Comparison] = ()) -> Path:
    """Write `report.html` of a trace, beside a reference if there is one. `verdicts`: those of the comparison, one for
    each optimizer, unless it was `diff` without options. Errors: `RunError`."""
    from lockstep.track.report.report import write_page

    with refusing():
        trace = read(folder)
        values = values_of(trace, read(reference) if reference is not None else None, verdicts)
    return write_page(folder / "report.html", "trace.html.jinja", **values)
