"""Charts without script and without network: lines as inline SVG; stacked bars, a heat map and a time line as rows that
bend to the width of a phone. Colours are classes of the page's style sheet, which alone knows light, dark and print.

In: numbers. Out: markup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 360, 180
LEFT, BELOW = 44, 18  # room for the numbers at the axes
POINTS = 150  # at most so many are drawn of a series: each stands for a stretch, and a band shows what lies in it
COLOURS = 8  # classes c0 ... c7; further series are dashed

Series = Sequence[tuple[float, float]]


def number(value: object) -> str:
    """A number as short as it can be read: 12,345 and 0.1234 and 1.2e-5."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}" if size >= 1e-3 else f"{value:.2g}".replace("e-0", "e-")


def seconds(value: float) -> str:
    """A duration: 0.8 ms, 3.2 s, 4 min 05 s, 2 h 03 min."""
    if value < 0.1:
        return f"{value * 1e3:.2g} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _about(value: float) -> str:
    """A duration in its largest unit: 45 s, 5 min, 2 h, 3 d."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= unit:
            return f"{value / unit:.0f} {name}"
    return f"{value:.0f} s"


def size(value: float) -> str:
    """Bytes: 1.50 GiB, 340 MiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers between two numbers: 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(points: Series) -> list[tuple[float, float, float, float]]:
    """(x, mean, least, most) of at most POINTS stretches of a series."""
    every = -(-len(points) // POINTS)
    found = []
    for start in range(0, len(points), every):
        part = points[start : start + every]
        ys = [y for _, y in part]
        found.append((part[-1][0], sum(ys) / len(ys), min(ys), max(ys)))
    return found


def lines(title: str, series: Mapping[str, Series], x_name: str = "step", linear: bool = False) -> str:
    """A line for each series; nothing where no series has a point. The scale is logarithmic where the numbers are
    positive and far apart, and says so, or `linear` from zero."""
    drawn = {name: thinned(points) for name, points in series.items() if points}
    if not drawn:
        return ""
    lows = [low for points in drawn.values() for _, _, low, _ in points]
    highs = [high for points in drawn.values() for _, _, _, high in points]
    low, high = min(lows), max(highs)
    log = not linear and low > 0 and high / low > 100
    if linear:
        low = min(low, 0.0)
    if log:
        low, high = math.log10(low), math.log10(high)
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # a level line, whatever its level
        room = abs(high) * 0.1 or 1.0
        low, high = low - room, high + room
    right = max(points[-1][0] for points in drawn.values())
    left = min(points[0][0] for points in drawn.values())
    if right == left:
        left, right = left - 1, right + 1

    def across(x: float) -> float:
        return LEFT + (x - left) / (right - left) * (WIDTH - LEFT)

    def up(y: float) -> float:
        return HEIGHT - ((math.log10(y) if log else y) - low) / (high - low) * HEIGHT

    body = _grid(low, high, left, right, across, log)
    places = {name: i for i, name in enumerate(series)}  # a series has its colour whether others have points or not
    for name, points in drawn.items():
        i = places[name]
        colour, dash = f"c{i % COLOURS}", f' stroke-dasharray="{3 + 2 * (i // COLOURS)} 3"' if i >= COLOURS else ""
        if any(a != b for _, _, a, b in points):
            edge = [f"{across(x):.1f},{up(b):.1f}" for x, _, _, b in points]
            edge += [f"{across(x):.1f},{up(a):.1f}" for x, _, a, _ in reversed(points)]
            body += f'<polygon class="band {colour}" points="{" ".join(edge)}"/>'
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y, _, _ in points)
        body += f'<polyline class="line {colour}"{dash} points="{path}"/>' if len(points) > 1 else ""
        if len(points) <= 30:
            for x, y, _, _ in points:
                tip = escape(f"{name}, {x_name} {number(x)}: {number(y)}")
                body += (
                    f'<circle class="dot {colour}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.5"><title>{tip}</title>'
                    "</circle>"
                )
    note = " (logarithmic)" if log else ""
    body += f'<text x="{WIDTH}" y="{HEIGHT + BELOW + 13}" text-anchor="end">{escape(x_name)}</text>'
    legend = _legend(list(drawn), [_class(places[name]) for name in drawn]) if len(series) > 1 else ""
    return _figure(title + note, body, legend, f"0 -8 {WIDTH} {HEIGHT + BELOW + 24}")


def _grid(low: float, high: float, left: float, right: float, across: object, log: bool) -> str:
    """Level lines with their numbers, and numbers below."""
    assert callable(across)
    body = ""
    levels = ticks(low, high)
    if log and len({math.floor(v) for v in levels if v == math.floor(v)}) >= 2:
        levels = [v for v in levels if v == math.floor(v)]
    for level in levels:
        y = HEIGHT - (level - low) / (high - low) * HEIGHT
        value = 10**level if log else level
        text = number(float(f"{value:.3g}")) if abs(value) > 1e-12 else "0"
        body += f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        body += f'<text x="{LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    for x in ticks(left, right):
        anchor = "end" if across(x) > WIDTH - 12 else "middle"
        text = number(float(f"{x:.6g}"))
        body += f'<text x="{across(x):.1f}" y="{HEIGHT + BELOW - 3}" text-anchor="{anchor}">{text}</text>'
    return body + f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{HEIGHT}" y2="{HEIGHT}"/>'


def bars(title: str, rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], unit: str = "") -> str:
    """A bar of stacked parts for each row, in seconds; `colours` gives each part's class."""
    if not rows:
        return ""
    most = max(sum(parts.values()) for parts in rows.values()) or 1.0
    body = ""
    for name, parts in rows.items():
        cells = ""
        for part, value in parts.items():
            if value / most >= 0.0005:
                tip = escape(f"{name}: {part} {seconds(value)}{unit}")
                cells += f'<i class="{colours[part]}" style="width:{value / most * 100:.2f}%" title="{tip}"></i>'
        total = escape(seconds(sum(parts.values())) + unit)
        body += f'<b title="{escape(name)}">{escape(name)}</b><div class="bar">{cells}</div><span>{total}</span>'
    used = [part for part in colours if any(parts.get(part, 0.0) / most >= 0.0005 for parts in rows.values())]
    legend = _legend(used, [colours[part] for part in used])
    return _wide(title, f'<div class="bars">{body}</div>', legend)


def heat(title: str, rows: Mapping[str, Sequence[float]], ends: tuple[str, str], says: str) -> str:
    """A field of cells, one row a name: 1.0 is what is usual and has no colour, 2.0 and more has the strongest."""
    if not rows:
        return ""
    columns = max(len(values) for values in rows.values())
    body = ""
    for name, values in rows.items():
        cells = ""
        for j, value in enumerate(values):
            strength = min(1.0, max(0.0, value - 1.0))
            tip = escape(f"{name}: {value:.2f} {says}")
            cells += f'<rect x="{j}" width="1.02" height="1" fill-opacity="{strength:.2f}"><title>{tip}</title></rect>'
        field = f'<svg viewBox="0 0 {columns} 1" preserveAspectRatio="none" aria-hidden="true">{cells}</svg>'
        body += f'<b>{escape(name)}</b><div class="heat">{field}</div>'
    body += f"<b></b><p><span>{escape(ends[0])}</span><span>{escape(ends[1])}</span></p>"
    return _wide(title, f'<div class="bars two">{body}</div>')


def timeline(
    title: str,
    spans: Sequence[tuple[float, float, str]],
    marks: Mapping[str, Sequence[tuple[float, str]]],
    begun: str,
) -> str:
    """Stretches of time (begin, end, what; unix seconds) on one line, and below them rows of marks (when, what). Pauses
    between stretches have one width and say how long they were."""
    if not spans:
        return ""
    total = sum(max(end - begin, 1e-3) for begin, end, _ in spans)
    pause = min(14.0, 50 / len(spans)) if len(spans) > 1 else 0.0
    scale = (100 - pause * (len(spans) - 1)) / total  # per cent a second
    places: list[tuple[float, float, float]] = []  # begin, end, per cent from the left
    at, cells = 0.0, ""
    for i, (begin, end, what) in enumerate(spans):
        if i:
            away = max(0.0, begin - spans[i - 1][1])
            tip = escape(f"pause: {seconds(away)}")
            cells += f'<em style="width:{pause:.2f}%" title="{tip}">{_about(away)}</em>'
            at += pause
        places.append((begin, end, at))
        wide = max(end - begin, 1e-3) * scale
        tip = escape(f"{what}: {seconds(end - begin)}")
        cells += f'<i class="{"c0" if i % 2 == 0 else "c4"}" style="width:{wide:.2f}%" title="{tip}"></i>'
        at += wide
    body = f'<b>running</b><div class="bar">{cells}</div>'
    for row, (name, found) in enumerate(marks.items()):
        dots = ""
        for when, what in found:
            place = next((p for p in places if p[0] <= when <= p[1]), None)
            if place is not None:
                left = place[2] + (when - place[0]) * scale
                dots += f'<i class="c{row + 1}" style="left:{left:.2f}%" title="{escape(what)}"></i>'
        body += f'<b>{escape(name)}</b><div class="marks">{dots}</div>'
    body += f"<b></b><p><span>{escape(begun)}</span><span>{seconds(total)} in all</span></p>"
    return _wide(title, f'<div class="bars two">{body}</div>')


def _class(place: int) -> str:
    return f"c{place % COLOURS}{' dashed' if place >= COLOURS else ''}"


def _legend(names: Sequence[str], colours: Sequence[str]) -> str:
    return "".join(
        f'<span><i class="{colour}"></i>{escape(name)}</span>' for name, colour in zip(names, colours, strict=True)
    )


def _figure(title: str, body: str, legend: str, box: str) -> str:
    name = escape(title)
    legend = f'<div class="legend">{legend}</div>' if legend else ""
    return (
        f"<figure><figcaption>{name}</figcaption>{legend}"
        f'<svg class="chart" viewBox="{box}" role="img" aria-label="{name}">{body}</svg></figure>'
    )


def _wide(title: str, body: str, legend: str = "") -> str:
    legend = f'<div class="legend">{legend}</div>' if legend else ""
    return f'<figure class="wide"><figcaption>{escape(title)}</figcaption>{legend}{body}</figure>'
