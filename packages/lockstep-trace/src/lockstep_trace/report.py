"""The page of a trace, which another distribution writes: `pip install "lockstep-trace[report]"`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep_trace.coded import TraceError
from lockstep_trace.compare_traces import Comparison


def write(folder: Path, reference: Path | None = None, verdicts: Sequence[Comparison] = ()) -> Path:
    """Write the page of the trace in `folder`, compared with a reference if given, and return its path.

    `verdicts`: comparisons, one per optimizer; by default they are computed. Errors: `TraceError`, `OSError`."""
    try:
        from lockstep_trace_report import write as write_page
    except ImportError:
        text = 'the page of a trace needs lockstep-trace-report: pip install "lockstep-trace[report]"'
        raise TraceError("LS9033", text) from None
    return write_page(folder, reference, verdicts)
