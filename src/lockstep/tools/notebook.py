"""A progress bar in a notebook's cell, drawn by IPython, which is there anyway.

In: events. Out: one display that is replaced as they come: HTML where the frontend shows it, else a line of text.
"""

from __future__ import annotations

import math
import sys
from html import escape
from typing import Any

from lockstep.tools.event_stream import Event
from lockstep.track.best import Best


def bar(by: str | None = None) -> Bar | None:
    """A bar in the cell that is being run, or None outside of a notebook. `by`: the metric that says what is best."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or "IPKernelApp" not in shell.config:  # a REPL of IPython has no cells
        return None
    from IPython.display import display

    found = Bar(by)
    found.shown = display(found, display_id=True)
    return found


class Bar:
    """What it shows is in its two representations, as IPython asks for them."""

    def __init__(self, by: str | None = None) -> None:
        self.step, self.steps, self.state = 0, 0, "preparing"
        self.numbers, self._best = "", Best(by)
        self.shown: Any = None  # the display in the cell, which can be replaced

    def __call__(self, event: Event) -> None:
        """Take up an event, and show it."""
        self.step, self.steps = event.step or self.step, event.steps or self.steps
        if event.kind in ("start", "step"):
            self.state = "training"
        elif event.kind == "end":
            self.state = str(event.facts["status"])
        if event.split == "validation":
            self._best.seen(event.step, event.numbers)
        if event.kind == "step" and math.isfinite(event.numbers.get("loss", math.nan)):
            self.numbers = f"loss {event.numbers['loss']:.4f}"
        if self.shown is not None:
            self.shown.update(self)

    def __repr__(self) -> str:
        full = 30 * self.step // self.steps if self.steps else 0
        return f"[{'#' * full}{'.' * (30 - full)}] {self._text}"

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self.step}" max="{self.steps or 1}" style="width: 20em"></progress>'
        return f"{bar} {escape(self._text)}"

    @property
    def _text(self) -> str:
        far = f"{self.step:,}/{self.steps:,}" if self.steps else ""
        return "  ".join(filter(None, (self.state, far, self.numbers, self._best.text)))
