"""Writes the self-contained report page of a run, or a comparison of several runs, without scripts or network access.

In: records of output folders (track/history.py). Out: OUTPUT/report.html, or a comparison at any path. Imports no
torch, so that pages can be written on any machine.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lockstep._version import __version__
from lockstep.config import error_messages as messages
from lockstep.config.errors import RunError
from lockstep.config.output_files import replace_text
from lockstep.track.history import History, read
from lockstep.track.report import charts, panels
from lockstep_trace.redaction import printable

if TYPE_CHECKING:
    from jinja2 import Environment

_NO_METRICS = ("step", "examples")
# Fields of a history, and the files that they are read from
_RECORDS = {
    "metrics": "metrics.jsonl",
    "events": "events.jsonl",
    "ranks": "ranks.jsonl",
    "system": "system.jsonl",
    "samples": "samples.jsonl",
    "tables": "tables.json",
    "scores": "scores.json",
}
# Errors of a page whose records hold values of other types
DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Live:
    """Options of the page of a run in progress."""

    every_s: int  # reload interval of the page
    doing: str  # present activity
    steps: int | None = None  # total, if known


def write_report(folder: Path, live: Live | None = None) -> Path:
    """Write `report.html` of an output folder, at any stage of its run. `live`: for a run in progress, reload the page
    periodically. Errors: `OSError` or `ValueError` if the folder holds no run."""
    history = read(folder)
    return write_page(folder / "report.html", "run.html.jinja", title=history.name, live=live, **_page(history, live))


def damaged_records(folder: Path) -> list[str]:
    """Name the files that prevent the report page: those whose records alone cannot be rendered, or, if there are none,
    those without which the page can be. Returns [] if neither holds for any file. Errors: as `write_report`."""
    history = read(folder)
    without = {field: type(getattr(history, field))() for field in _RECORDS}
    alone = [
        field for field in _RECORDS if not _can_be_shown(replace(history, **without | {field: getattr(history, field)}))
    ]
    if not alone:
        alone = [field for field, empty in without.items() if _can_be_shown(replace(history, **{field: empty}))]
    return [_RECORDS[field] for field in alone if getattr(history, field)]


def _can_be_shown(history: History) -> bool:
    """Return whether the report page can be rendered from a history."""
    try:
        _rendered("run.html.jinja", title=history.name, **_page(history, None))
    except DAMAGED:
        return False
    return True


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write a comparison of several runs to `path`: differing keys, a table of results, and overlaid curves. Errors:
    `OSError` or `ValueError`, naming the folder that holds no run."""
    histories = {}
    for folder, name in zip(folders, _names(folders), strict=True):
        try:
            histories[name] = read(folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} is not the output folder of a run: {error}") from None
    title = f"{len(histories)} runs"
    return write_page(path, "comparison.html.jinja", title=title, **_comparison(histories, path.parent))


@cache
def templates() -> Environment:
    """Return the templates of `pages/`, each compiled once per process. Errors: `RunError` in a clone that was updated
    after its installation."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # the base template is in lockstep-trace-report, whose import would bring all that reads traces
    base = importlib.util.find_spec("lockstep_trace_report")
    if base is None:
        raise RunError(
            "LS0501",
            "pages need lockstep-trace-report, which is not installed: pip install "
            f"lockstep-trace-report=={__version__}, or in a clone: pip install -e packages/lockstep-trace-report",
        )
    folders = [Path(str(file)).with_name("pages") for file in (__file__, base.origin)]
    pages = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_for_page,  # applied before HTML escaping
    )
    pages.filters |= {"number": charts.number, "seconds": charts.seconds, "size": charts.size, "percent": _percent}
    return pages


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Render a template of `pages/` to `path`, atomically. Errors: `OSError`."""
    text = printable(_rendered(template, **values))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)  # atomic: a live page and the run may write concurrently
    return path


def _rendered(template: str, **values: Any) -> str:
    values = {"live": None, "written": time.strftime("%Y-%m-%d %H:%M:%S")} | values
    return templates().get_template(template).render(**values)


# -- one run ---------------------------------------------------------------------------------------------------------


def _page(history: History, live: Live | None) -> dict[str, Any]:
    """Return the template values of a run's page."""
    results = history.results
    final = history.facts_of("finish")
    return {
        "history": history,
        "folder": history.folder.resolve().name,
        "tiles": _tiles(history, final),
        "results": _table(results, final.get("best_possible", {})),
        "curves": panels.curves(history),
        "time": panels.time_of_ranks(history),
        "prices": panels.prices(history),
        "timeline": panels.timeline(history),
        "memory": panels.memory(history),
        "matrices": [
            {"split": split, **_matrix(tables["confusion"])}
            for split, tables in history.tables.items()
            if "confusion" in tables
        ],
        "predictions": panels.panels(history.tables),
        "samples": _samples(history),
        "profiles": history.profiles,
        "facts": panels.facts(history),
        "checks": panels.checks(history),
        "answer": "" if live else panels.answer(history),
        "findings": panels.findings(history, live is not None),
    }


def _tiles(history: History, final: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the most important numbers: (name, value)."""
    tiles = []
    for split in ("test", "validation"):
        if split in history.results:
            numbers = {k: v for k, v in history.results[split].items() if k not in _NO_METRICS}
            tiles += [(f"{name.replace('_', ' ')}, {split}", charts.number(v)) for name, v in list(numbers.items())[:3]]
            break
    if (best := history.best).step is not None:
        tiles.append((f"best {best.name.replace('_', ' ')}, validation, step {best.step:,}", charts.number(best.value)))
    if attempts := history.attempts:
        tiles.append(("running time", charts.seconds(sum(a.ended - a.began for a in attempts))))
    if rate := history.series("train", "examples_per_s"):
        tiles.append(("examples per second", charts.number(round(median([y for _, y in rate]), 1))))
    if history.peak_bytes is not None:
        tiles.append(("peak memory of a rank", charts.size(history.peak_bytes)))
    if final.get("weights"):
        tiles.append(("weights, sha256", str(final["weights"])[:10]))
    return tiles


def _table(results: Mapping[str, Mapping[str, Any]], best: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return a table with a row per metric and a column per split."""
    names = list(dict.fromkeys(name for numbers in results.values() for name in numbers if name != "step"))
    rows = []
    for name in names:
        cells = []
        for split, numbers in results.items():
            text = charts.number(numbers[name]) if name in numbers else ""
            limit = best.get(split, {}).get(name)
            cells.append((text, f"best possible {charts.number(limit)}" if limit is not None else ""))
        rows.append((name, cells))
    return {"splits": [(split, numbers["step"]) for split, numbers in results.items()], "rows": rows}


def _samples(history: History) -> dict[str, Any] | None:
    """Return the newest samples as a table."""
    if not history.samples:
        return None
    newest = history.samples[-1]
    rows = [sample if isinstance(sample, dict) else {"text": sample} for sample in newest["samples"]]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return {"step": newest["step"], "columns": columns, "rows": [[row.get(c, "") for c in columns] for row in rows]}


def _matrix(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a confusion matrix with cells (count, share of its row, colour intensity 0 to 1), and scores per class.
    Errors are scaled by the most frequent one, so that rare errors stay visible."""
    labels, counts = table["labels"], table["counts"]
    totals = [sum(row) for row in counts]
    shares = [[n / total if total else 0.0 for n in row] for row, total in zip(counts, totals, strict=True)]
    most = max((s for i, row in enumerate(shares) for j, s in enumerate(row) if i != j), default=0.0)

    def strength(i: int, j: int) -> float:
        share = shares[i][j]
        return share if i == j or not share else 0.15 + 0.85 * share / most

    rows = [
        (label, totals[i], [(n, shares[i][j], strength(i, j)) for j, n in enumerate(counts[i])])
        for i, label in enumerate(labels)
    ]
    return {"labels": labels, "rows": rows, "classes": _classes(labels, counts)}


def _classes(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> list[tuple[str, str, str, str, int]]:
    """Return (label, precision, recall, F1, examples) per class, with a dash for undefined scores."""
    rows = []
    for i, label in enumerate(labels):
        right, true, guessed = counts[i][i], sum(counts[i]), sum(row[i] for row in counts)
        scores = [(right, guessed), (right, true), (2 * right, true + guessed)]
        rows.append((label, *(f"{part / whole:.3f}" if whole else "\u2013" for part, whole in scores), true))
    return rows  # type: ignore[return-value]


# -- several runs ----------------------------------------------------------------------------------------------------


def _comparison(histories: Mapping[str, History], folder: Path) -> dict[str, Any]:
    """Return the template values of a comparison."""
    flat = {name: messages.flat(history.run) for name, history in histories.items()}
    keys = list(dict.fromkeys(key for values in flat.values() for key in values if key not in ("name", "output")))
    differing = [key for key in keys if len({repr(values.get(key)) for values in flat.values()}) > 1]
    return {
        "runs": [
            (name, history, quote(os.path.relpath(history.folder / "report.html", folder)))
            for name, history in histories.items()
        ],
        "findings": [
            (name, [what for what, _ in rows])
            for name, history in histories.items()
            if (rows := panels.findings(history))
        ],
        "differing": [(key, [_value(values.get(key)) for values in flat.values()]) for key in differing],
        "same": len(keys) - len(differing),
        "results": _side_by_side(histories),
        "curves": panels.overlaid(histories),
        "time": panels.time_of_runs(histories),
    }


def _side_by_side(histories: Mapping[str, History]) -> list[tuple[str, list[str]]]:
    """Return rows (name, value in each run) that at least one run has."""
    columns: list[dict[str, str]] = []
    metrics = dict.fromkeys(
        (split, name) for h in histories.values() for split, numbers in h.results.items() for name in numbers
    )
    for history in histories.values():
        column = {"state": history.state, "steps": charts.number(history.steps)}
        for split, name in sorted(metrics, key=lambda metric: metric[0] != "validation"):
            if name not in _NO_METRICS:
                column[f"{split} {name}"] = charts.number(history.results.get(split, {}).get(name, ""))
        for name, key in (("examples per second", "examples_per_s"), ("seconds per step", "seconds_per_step")):
            if points := history.series("train", key):
                column[name] = charts.number(float(f"{median([y for _, y in points]):.4g}"))
        if history.attempts:
            column["running time"] = charts.seconds(sum(a.ended - a.began for a in history.attempts))
            column["starts"] = str(len(history.attempts))
            column["processes"] = str(history.facts.get("processes", ""))
        if history.peak_bytes is not None:
            column["peak memory of a rank"] = charts.size(history.peak_bytes)
        for name, text, _ in panels.prices(history):
            share, _, of = text.partition(" of the ")
            column[f"{name}, share of {of}"] = share
        if weights := history.facts_of("finish").get("weights"):
            column["weights, sha256"] = str(weights)[:10]
        columns.append(column)
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as much of their paths as is needed to distinguish them."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        twice = next(folder for folder, p in zip(folders, parts, strict=True) if parts.count(p) > 1)
        raise ValueError(f"{twice} is given twice")
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _value(value: object) -> str:
    if value is None:
        return ""
    return charts.number(value) if isinstance(value, int | float) else str(value)


def _for_page(value: Any) -> Any:
    """Sanitize a value for the page. Markup (`safe`) passes unchanged: it is built from escaped texts."""
    return printable(value) if type(value) is str else value


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 or share == 0 else f"{share:.1%}"
