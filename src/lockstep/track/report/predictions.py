"""What predictions of a split look like beside what is true: scores of each label, calibration, scatters, and what else
a task draws.

In: tables that a task has made of a split (tables.json). Out: markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lockstep.track.report import charts

_MOST_LABELS = 100  # drawn at most, the commonest


def panels(tables: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each split that has any: its name, charts, and the scores of its labels."""
    found = []
    for split, of_split in tables.items():
        drawn = [_reliability(of_split["reliability"])] if "reliability" in of_split else []
        drawn += _scatters(of_split["scatter"]) if "scatter" in of_split else []
        for plot in of_split.get("plots", ()):
            drawn.append(charts.lines(plot["title"], plot["lines"], charts.ChartStyle(x_name=plot["x"], linear=True)))
        labels = _labels(of_split["labels"]) if "labels" in of_split else None
        if drawn or labels:
            found.append({"split": split, "charts": drawn, "labels": labels})
    return found


def _labels(table: Mapping[str, Any]) -> dict[str, Any]:
    """Bars of each label's F1, the best first, and a row of its scores: (label, precision, recall, F1, average
    precision, examples). A dash where there is nothing to divide by."""
    rows = []
    areas = table.get("average_precision")
    told = [table[key] for key in ("names", "right", "examples", "given")]
    for name, right, true, given, area in zip(*told, areas or [None] * len(table["names"]), strict=True):
        f1 = 2 * right / (true + given) if true + given else None
        rows.append((name, right / given if given else None, right / true if true else None, f1, area, true))
    shown = sorted(rows, key=lambda row: -row[5])[:_MOST_LABELS]
    shown.sort(key=lambda row: -(row[3] or 0.0))
    bars = ""
    for name, _, _, f1, _, _ in shown:
        tip = escape(f"{name}: F1 {_score(f1)}")
        cell = f'<i class="c0" style="width:{100 * (f1 or 0.0):.2f}%" title="{tip}"></i>'
        bars += f'<b title="{escape(name)}">{escape(name)}</b><div class="bar">{cell}</div><span>{_score(f1)}</span>'
    title = f"F1 of each {table.get('of', 'label')}" + (
        f", the {len(shown)} commonest of {len(rows)}" if len(shown) < len(rows) else ""
    )
    return {
        "bars": charts.wide_figure(title, f'<div class="bars">{bars}</div>'),
        "of": table.get("of", "label"),
        "threshold": table.get("threshold"),
        "areas": areas is not None,
        "rows": [(name, *map(_score, scores), true) for name, *scores, true in shown],
    }


def _score(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.3f}"


def _reliability(table: Mapping[str, Any]) -> str:
    """Predicted probabilities against what came true, a dot for each bin, larger for more examples."""
    every = zip(table["predicted"], table["observed"], table["counts"], strict=True)
    bins = [(x, y, count) for x, y, count in every if count]
    total = sum(count for *_, count in bins)
    error = sum(abs(x - y) * count for x, y, count in bins) / total
    place = charts.Axes(0.0, 1.0, 0.0, 1.0, False)
    body = charts.grid(charts.ticks(0.0, 1.0), place) + _diagonal(place)
    line = " ".join(f"{place.across(x):.1f},{place.up(y):.1f}" for x, y, _ in bins)
    body += f'<polyline class="line faint c0" points="{line}"/>'
    for x, y, count in bins:
        tip = f"{count:,} of {total:,}: predicted {x:.3f}, came true {y:.3f}"
        body += _dot(place, x, y, 2.5 + 5 * (count / total) ** 0.5, tip)
    title = f"calibration of {table['of']}: share that came true, by predicted probability (ECE {error:.3f})"
    return _figure(title, body, "predicted probability")


def _scatters(table: Mapping[str, Any]) -> list[str]:
    """True numbers against predicted ones, a chart for each number."""
    found = []
    for name, true, predicted in zip(table["names"], table["true"], table["predicted"], strict=True):
        low, high = min(*true, *predicted), max(*true, *predicted)
        if high - low <= 1e-12 * max(abs(low), abs(high)):  # one point, or one level
            low, high = low - 1.0, high + 1.0
        levels = charts.ticks(low, high)
        place = charts.Axes(levels[0], levels[-1], levels[0], levels[-1], False)
        body = charts.grid(levels, place) + _diagonal(place)
        for x, y in zip(true, predicted, strict=True):
            body += _dot(place, x, y, 2.0, f"true {charts.number(x)}, predicted {charts.number(y)}")
        some = f", {len(true):,} of {table['examples']:,} examples" if len(true) < table["examples"] else ""
        found.append(_figure(f"{name}: predicted, by what is true{some}", body, "true"))
    return found


def _diagonal(place: charts.Axes) -> str:
    ends: Sequence[float] = (place.left, place.right)
    (x1, y1), (x2, y2) = ((place.across(end), place.up(end)) for end in ends)
    return f'<line class="level" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _dot(place: charts.Axes, x: float, y: float, radius: float, tip: str) -> str:
    at = f'cx="{place.across(x):.1f}" cy="{place.up(y):.1f}" r="{radius:.1f}"'
    return f'<circle class="dot many c0" {at}><title>{escape(tip)}</title></circle>'


def _figure(title: str, body: str, below: str) -> str:
    right, bottom = charts.WIDTH - charts.RIGHT, charts.HEIGHT + charts.BELOW
    body += f'<text x="{right}" y="{bottom + 13}" text-anchor="end">{escape(below)}</text>'
    box = f"0 {-charts.ABOVE} {charts.WIDTH} {bottom + charts.ABOVE + 16}"
    return charts.figure(title, body, "", box)
