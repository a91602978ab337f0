"""Writes the page of a trace: one HTML file without scripts or network access.

In: the folder of a trace, and optionally of a reference. Out: `report.html` in the trace's folder. Needs jinja2:
`pip install "lockstep-trace[report]"`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep_trace.coded import TraceError
from lockstep_trace.compare_traces import Comparison
from lockstep_trace.page import values_of
from lockstep_trace.read import read
from lockstep_trace.redaction import printable

PAGE = "report.html"


def write(folder: Path, reference: Path | None = None, verdicts: Sequence[Comparison] = ()) -> Path:
    """Write the page of the trace in `folder`, compared with a reference if given, and return its path.

    `verdicts`: comparisons, one per optimizer; by default they are computed here, with default options. Errors:
    `TraceError`, `OSError`."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise TraceError("LS9033", 'the page of a trace needs jinja2: pip install "lockstep-trace[report]"') from None
    trace = read(folder)
    values = values_of(trace, read(reference) if reference is not None else None, verdicts)
    pages = Environment(
        loader=PackageLoader("lockstep_trace", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    values |= {"live": None, "written": time.strftime("%Y-%m-%d %H:%M:%S")}
    text = printable(pages.get_template("trace.html.jinja").render(**values))
    path = folder / PAGE
    aside = folder / f".{PAGE}.{os.getpid()}.partial"
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
    return path
