"""One self-contained page for a run: what was run, its curves and its results, without any network.

In: OUTPUT's run.yaml and metrics.jsonl. Out: OUTPUT/report.html.
"""

from __future__ import annotations

import html
import json
import math
from pathlib import Path

_STYLE = """
:root{color-scheme:light dark;--line:#2563eb;--other:#d97706;--grid:#8884}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse}td,th{padding:.25rem .75rem;border-bottom:1px solid var(--grid);text-align:right}
td:first-child,th:first-child{text-align:left}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1.5rem}
figure{margin:0}figcaption{font-weight:600}svg{width:100%;height:auto;overflow:visible}
svg text{font-size:11px;fill:currentColor}pre{overflow-x:auto;padding:1rem;border:1px solid
var(--grid);border-radius:.5rem}
"""
# what is drawn -> (splits, key in metrics.jsonl)
_PLOTS = {
    "loss": (("train", "validation"), "loss"),
    "accuracy": (("validation",), "accuracy"),
    "perplexity": (("validation",), "perplexity"),
    "BLEU": (("validation",), "bleu"),
    "F1": (("validation",), "f1"),
    "learning rate": (("train",), "learning_rate"),
    "gradient norm before clipping": (("train",), "grad_norm"),
    "examples per second": (("train",), "examples_per_s"),
    "padding: tokens computed per real token": (("train",), "padding"),
}


def write_report(folder: Path) -> Path:
    """Write `report.html` of an output folder. Errors: `OSError` when it holds no run."""
    run = (folder / "run.yaml").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    results = {line["split"]: line for line in lines if line["split"] != "train"}
    names = [k for k in next(iter(results.values()), {}) if k not in ("step", "split")]
    head = "".join(f"<th>{html.escape(n)}</th>" for n in ["split", "step", *names])
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_text(line.get(k)))}</td>" for k in ["split", "step", *names]) + "</tr>"
        for line in results.values()
    )
    plots = "".join(_plot(title, lines, splits, key) for title, (splits, key) in _PLOTS.items())
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(folder.name)}</title><style>{_STYLE}</style><h1>{html.escape(folder.name)}</h1>"
        f"<h2>Results</h2><table><tr>{head}</tr>{rows}</table><h2>Curves</h2><div class=plots>{plots}</div>"
        f"<h2>Run file</h2><pre>{html.escape(run)}</pre></html>"
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _text(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value}"


def _plot(title: str, lines: list[dict], splits: tuple[str, ...], key: str) -> str:
    """One SVG line chart; nothing when there are fewer than two points in every split."""
    series = {}
    for split in splits:
        points = [(line["step"], line[key]) for line in lines if line["split"] == split and key in line]
        points = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
        if len(points) > 1:
            series[split] = points
    if not series:
        return ""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    low, high = min(*ys), max(*ys)
    low, high = (low, high) if high > low else (low - 1, high + 1)
    width, height = 400, 200

    def place(x: float, y: float) -> str:
        across = (x - min(xs)) / max(1, max(xs) - min(xs)) * width
        return f"{across:.1f},{height - (y - low) / (high - low) * height:.1f}"

    drawn = ""
    for i, (split, points) in enumerate(series.items()):
        colour = ("var(--line)", "var(--other)")[i]
        line = " ".join(place(x, y) for x, y in points)
        drawn += f'<polyline fill="none" stroke="{colour}" points="{line}"/>'
        if len(series) > 1:
            drawn += f'<text x="{width - 90}" y="{14 + 14 * i}" style="fill:{colour}">{split}</text>'
    axes = (
        f'<line x1="0" y1="{height}" x2="{width}" y2="{height}" stroke="var(--grid)"/>'
        f'<text x="0" y="-4">{high:.4g}</text><text x="0" y="{height + 14}">{low:.4g}</text>'
        f'<text x="{width}" y="{height + 14}" text-anchor="end">step {max(xs)}</text>'
    )
    box = f"0 -16 {width} {height + 36}"
    return f'<figure><figcaption>{title}</figcaption><svg viewBox="{box}">{axes}{drawn}</svg></figure>'
