"""Writes the page of a trace: one HTML file without scripts or network access.

In: the folder of a trace, and optionally of a reference. Out: `report.html` in the trace's folder, with findings, the
verdict, a heat map of steps by parameters, and the examples of each rank.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lockstep_trace.compare_traces import COLUMNS as COMPARED
from lockstep_trace.compare_traces import Comparison, compare_traces, gradient_differences, row_cells
from lockstep_trace.findings import findings
from lockstep_trace.ranks import data_ranks, merged
from lockstep_trace.read import Trace, read
from lockstep_trace.redaction import printable, redact_words

PAGE = "report.html"
COLUMNS = 60  # steps of a heat map
ROWS = 200  # parameters
LANES = 48  # steps of the ranks' examples


def write(folder: Path, reference: Path | None = None, verdicts: Sequence[Comparison] = ()) -> Path:
    """Write the page of the trace in `folder`, compared with a reference if given, and return its path.

    `verdicts`: comparisons, one per optimizer; by default they are computed here, with default options. Errors:
    `TraceError`, `OSError`."""
    trace = read(folder)
    values = values_of(trace, read(reference) if reference is not None else None, verdicts)
    pages = Environment(
        loader=PackageLoader("lockstep_trace_report", "pages"),
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


def values_of(trace: Trace, reference: Trace | None, verdicts: Sequence[Comparison] = ()) -> dict[str, Any]:
    """Return the values of the page. `verdicts`: comparisons, one per optimizer; by default they are computed here.
    Errors: `TraceError` if the traces have nothing in common."""
    known = {verdict.optimizer: verdict for verdict in verdicts}
    if reference is not None and not known:
        known = {
            o: compare_traces(reference, trace, optimizer=o) for o in trace.optimizers if o in reference.optimizers
        }
    return {
        "title": _command(trace),
        "trace": trace,
        "reference": _command(reference) if reference is not None else None,
        "findings": findings(trace),
        "evaluations": _evaluations(trace),
        "parts": [_part(trace, reference, known.get(o), o) for o in trace.optimizers],
    }


def _part(trace: Trace, reference: Trace | None, verdict: Comparison | None, optimizer: int) -> dict[str, Any]:
    kind = next(s for r in trace.ranks for s in r.steps.get(optimizer, {}).values()).layout.optimizer
    heat = _norms(trace, optimizer) if reference is None or verdict is None else None
    return {
        "optimizer": f"{kind}, optimizer {optimizer}" if len(trace.optimizers) > 1 else None,
        "verdict": verdict,
        "columns": COMPARED,
        "compared": [row_cells(row) for row in _spread(verdict.rows, 12)] if verdict is not None else [],
        "heat": heat or _differences(reference, trace, optimizer),  # type: ignore[arg-type]
        "lanes": _lanes(trace, optimizer),
        "steps": _steps(trace, optimizer),
    }


def _evaluations(trace: Trace) -> list[tuple[str, str, str]]:
    rank, rows = trace.ranks[0], []
    for each in rank.evaluations:
        mode = "training mode" if each["training"] else "evaluation mode"
        rows.append((each["steps"], f"forward of {each['model']}", f"{each['count']} examples, {mode}"))
    for each in rank.scores:
        rows.append((each["steps"], each["by"], ", ".join(f"{n} {x:.6g}" for n, x in each["scores"].items())))
    rows.sort(key=lambda row: sum(row[0]))
    return [(", ".join(map(str, steps)), what, text) for steps, what, text in _spread(rows, 24)]


def _command(trace: Trace) -> str:
    words = redact_words(trace.about.get("command") or [])  # the folder may be a stranger's
    return " ".join([Path(words[0]).name, *words[1:]]) if words else trace.folder.name


def _spread(values: Sequence[Any], count: int) -> list[Any]:
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _differences(reference: Trace, trace: Trace, optimizer: int) -> dict[str, Any]:
    steps = [s for s in reference.steps(optimizer) if s in set(trace.steps(optimizer))]
    measured = [(s, gradient_differences(reference, trace, optimizer, s)) for s in _spread(steps, COLUMNS)]
    columns = [(step, values) for step, values in measured if values]
    names = list(dict.fromkeys(n for _, values in columns for n in values))[:ROWS]
    cells = [(n, [(s, _text(v.get(n)), _strength(v.get(n), 1e-8, 1.0)) for s, v in columns]) for n in names]
    return {
        "title": "Differences of gradients",
        "about": "relative to the reference",
        "legend": [("the same bits", 0), *((f"1e{n}", _strength(10.0**n, 1e-8, 1.0)) for n in (-7, -5, -3, -1))],
        "first": columns[0][0] if columns else 0,
        "last": columns[-1][0] if columns else 0,
        "rows": cells,
    }


def _norms(trace: Trace, optimizer: int) -> dict[str, Any]:
    steps = [s for s in trace.steps(optimizer) if all(r.measured for _, r in trace.at(optimizer, s))]
    by_step: list[tuple[int, Mapping[str, float]]] = []
    for step in _spread(steps, COLUMNS):
        by_step.append(
            (step, {n: w.value.norm for n, w in merged(trace, optimizer, step, lambda s: s.unclipped).items()})
        )
    names = list(dict.fromkeys(n for _, norms in by_step for n in norms))[:ROWS]
    cells = []
    for name in names:
        own = [norms[name] for _, norms in by_step if norms.get(name, 0) > 0 and math.isfinite(norms[name])]
        low, high = (min(own) / 2, max(own)) if own else (1.0, 2.0)
        cells.append((name, [(s, _text(n.get(name)), _strength(n.get(name), low, high)) for s, n in by_step]))
    return {"title": "Gradient norms", "about": "each parameter beside its own largest", "rows": cells} | {
        "legend": [("no gradient", 0), ("its smallest", 30), ("its largest", 100)],
        "first": by_step[0][0] if by_step else 0,
        "last": by_step[-1][0] if by_step else 0,
    }


def _strength(value: float | None, low: float, high: float) -> int:
    if value is None or value == 0:
        return 0
    if not math.isfinite(value):
        return 100
    return round(100 * min(max(math.log(value / low) / math.log(high / low), 0.04), 1.0)) if high > low else 50


def _text(value: float | None) -> str:
    return "no gradient" if value is None else f"{value:.3g}"


def _lanes(trace: Trace, optimizer: int) -> dict[str, Any]:
    ranks = data_ranks(trace, optimizer)
    steps = trace.steps(optimizer)[:LANES]
    before: set[str] = set()
    columns: list[list[tuple[int, int, str]]] = [[] for _ in ranks]
    for step in steps:
        lists = [list(r.steps[optimizer][step].examples or ()) for r in ranks]
        for i, own in enumerate(lists):
            others = {h for j, each in enumerate(lists) if j != i for h in each}
            kind = "again" if set(own) & before else "new"
            if others & set(own):
                kind = "shared"
            columns[i].append((step, len(own), kind))
        before |= {h for each in lists for h in each}
    return {"rows": [(r.number, columns[i]) for i, r in enumerate(ranks)], "steps": len(steps)}


def _steps(trace: Trace, optimizer: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for step in _spread(trace.steps(optimizer), 12):
        record = trace.at(optimizer, step)[0][1]
        losses = [v / (s or 1.0) for v, s in record.losses if v is not None]
        norm = math.sqrt(sum(w.value.square for w in merged(trace, optimizer, step, lambda s: s.unclipped).values()))
        limit = next((c["limit"] for c in record.clips or ()), None)
        examples = sum(len(s.examples or ()) for _, s in trace.at(optimizer, step))
        rate = record.groups[0].get("lr")
        rows.append(
            (
                str(step),
                f"{sum(losses):.6g}" if losses else "",
                f"{rate:.4g}" if rate is not None else "",
                str(examples),
                "" if limit is None else f"{limit:g}",
                f"{norm:.4g}" if record.measured else "",
            )
        )
    return rows
