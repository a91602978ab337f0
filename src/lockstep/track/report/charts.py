"""Charts without scripts or network access: lines as inline SVG; stacked bars, heat maps and time lines as responsive
HTML rows. Colours are classes of the page's style sheet, which defines light, dark and print modes.

In: numbers. Out: markup.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 360, 180
LEFT, RIGHT, ABOVE, BELOW = 44, 8, 18, 18  # margins for axis numbers, and above for hover text
POINTS = 150  # maximum number of points per series; each is the mean of an interval, with its range as a band
COLOURS = 8  # classes c0 ... c7; further series are dashed
STRIPS = 100  # hover strips of a plot
ROWS = 13  # points per series in the table behind a chart, at most
SMOOTHED = 20  # a series with fewer points is not smoothed

Series = Sequence[tuple[float, float]]


def number(value: object) -> str:
    """Format a number briefly: 12,345, 0.1234, 1.2e-5, 1e30."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if size >= 1e15:
        return f"{value:.4g}".replace("e+", "e")
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size >= 1e-3 else f"{value:.2g}".replace("e-0", "e-")


def seconds(value: float) -> str:
    """Format a duration: 0.8 ms, 3.2 s, 4 min 05 s, 2 h 03 min."""
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
    """Format a duration in its largest unit: 45 s, 5 min, 2 h, 3 d."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= unit:
            return f"{value / unit:.0f} {name}"
    return f"{value:.0f} s"


def size(value: float) -> str:
    """Format bytes: 1.50 GiB, 340 MiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return axis ticks 1, 2 or 5 times a power of ten apart that enclose [low, high], so that both ends of the axis
    have a number."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return logarithmic ticks: 1, 2 and 5 times powers of ten, or only the powers for a large range."""
    digits = (1, 2, 5) if high / low < 2000 else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    first = max(v for v in ticks if v <= low * (1 + 1e-9))
    last = min(v for v in ticks if v >= high * (1 - 1e-9))
    return [v for v in ticks if first <= v <= last]


def thinned(points: Series) -> list[tuple[float, float, float, float]]:
    """Return (x, mean, minimum, maximum) of at most POINTS intervals of a series."""
    every = -(-len(points) // POINTS)
    selected = []
    for start in range(0, len(points), every):
        part = points[start : start + every]
        ys = [y for _, y in part]
        selected.append((part[-1][0], sum(ys) / len(ys), min(ys), max(ys)))
    return selected


def smoothed(points: Series) -> list[tuple[float, float]]:
    """Smooth a series by a centred moving mean over a twentieth of it. The window shrinks symmetrically near the ends,
    which avoids bias."""
    around, last = max(1, len(points) // 40), len(points) - 1
    averages = []
    for i, (x, _) in enumerate(points):
        wide = min(around, i, last - i)
        part = points[i - wide : i + wide + 1]
        averages.append((x, sum(y for _, y in part) / len(part)))
    return averages


@dataclass(frozen=True)
class ChartStyle:
    """Drawing options of a line chart."""

    x_name: str = "step"
    linear: bool = False  # from zero; else logarithmic for positive values of a large range
    doubling: bool = False  # logarithmic x axis with ticks at the points
    span: tuple[float, float] | None = None  # range of the x axis; None: that of the series
    colours: Mapping[str, int] = field(default_factory=dict)  # series -> colour; others by position
    smooth: tuple[str, ...] = ()  # series drawn smoothed, with faint raw values
    ring: tuple[str, float] | None = None  # (series, x of its best point)


def lines(title: str, series: Mapping[str, Series], look: ChartStyle = ChartStyle()) -> str:
    """Draw a line per series; empty if no series has points. A logarithmic scale is labelled. Hovering or touching
    shows the values above the plot, without a script."""
    drawn = {name: thinned(points) for name, points in series.items() if points}
    if not drawn:
        return ""
    every = [value for points in drawn.values() for _, _, least, most in points for value in (least, most)]
    low, high = min(every), max(every)
    log = not look.linear and low > 0 and high / low > 100
    low = min(low, 0.0) if look.linear else low
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # a constant series
        room = abs(high) * 0.1 or 1.0
        low, high = low - room, high + room
    levels = decades(low, high) if log else ticks(low, high)
    xs = [x for points in drawn.values() for x, _, _, _ in points]
    left, right = look.span or (min(xs), max(xs))
    if right == left:
        left, right = left - 1, right + 1
    place = Axes(left, right, levels[0], levels[-1], log, look.doubling)
    body = grid(levels, place, sorted(set(xs)) if look.doubling else None)
    places = {name: look.colours.get(name, i) for i, name in enumerate(series)}  # fixed, even if other series are empty
    for name, points in drawn.items():
        body += _drawn(points, places[name], name in look.smooth and len(series[name]) >= SMOOTHED, place)
    names, keys = list(drawn), [_class(places[name]) for name in drawn]
    if look.ring is not None and look.ring[0] in drawn:
        name, x = look.ring
        y = min(drawn[name], key=lambda point: abs(point[0] - x))[1]
        body += f'<circle class="ring c{places[name]}" cx="{place.across(x):.1f}" cy="{place.up(y):.1f}" r="5"/>'
        names, keys = [*names, f"best, {look.x_name} {number(x)}"], [*keys, f"round c{places[name]}"]
    body += _pointed({name: (series[name], places[name]) for name in drawn}, look.x_name, place)
    legend = _legend(names, keys) if len(names) > 1 or len(series) > 1 else ""
    table = data_table(look.x_name, {name: series[name] for name in drawn})
    return figure(title + (" (logarithmic)" if log else ""), body, look.x_name, legend, table)


def data_table(x_name: str, series: Mapping[str, Series]) -> str:
    """Return a collapsed table of a chart's numbers: at most ROWS evenly spaced points per series, including the first
    and the last."""
    chosen: set[float] = set()
    for points in series.values():
        count = min(ROWS, len(points))
        chosen |= {points[round(i * (len(points) - 1) / max(1, count - 1))][0] for i in range(count)}
    points_of = {name: dict(points) for name, points in series.items()}
    head = "".join(f"<th>{escape(name)}</th>" for name in (x_name, *series))
    rows = ""
    for x in sorted(chosen):
        values = [number(float(f"{points[x]:.5g}")) if x in points else "" for points in points_of.values()]
        rows += f"<tr>{''.join(f'<td>{text}</td>' for text in (number(x), *values))}</tr>"
    many = max(map(len, series.values()))
    note = f'<p class="soft">{len(chosen)} of {many:,} points</p>' if many > ROWS else ""
    return folded(f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>{note}')


def folded(table: str) -> str:
    """Return a collapsed table behind a chart."""
    return f'<details class="data"><summary>numbers</summary>{table}</details>'


@dataclass(frozen=True)
class Axes:
    """Mapping of values to SVG coordinates."""

    left: float
    right: float
    low: float
    high: float
    log: bool
    doubling: bool = False  # logarithmic x axis

    def across(self, x: float) -> float:
        if self.doubling:
            share = math.log(x / self.left) / math.log(self.right / self.left)
            return LEFT + share * (WIDTH - LEFT - RIGHT)
        return LEFT + (x - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def up(self, y: float) -> float:
        low, high, y = (math.log10(v) for v in (self.low, self.high, y)) if self.log else (self.low, self.high, y)
        return HEIGHT - (y - low) / (high - low) * HEIGHT


def _drawn(points: Sequence[tuple[float, float, float, float]], colour: int, smooth: bool, place: Axes) -> str:
    """Draw one series: a band for intervals, a line (faint below a smoothed one), dots for few points."""

    def path(kind: str, series: Series) -> str:
        text = " ".join(f"{place.across(x):.1f},{place.up(y):.1f}" for x, y in series)
        dash = f' stroke-dasharray="{3 + 2 * (colour // COLOURS)} 3"' if colour >= COLOURS else ""
        return f'<polyline class="{kind} c{colour % COLOURS}"{dash} points="{text}"/>'

    body, means = "", [(x, y) for x, y, _, _ in points]
    if any(a != b for _, _, a, b in points):
        edge = [f"{place.across(x):.1f},{place.up(b):.1f}" for x, _, _, b in points]
        edge += [f"{place.across(x):.1f},{place.up(a):.1f}" for x, _, a, _ in reversed(points)]
        body += f'<polygon class="band c{colour % COLOURS}" points="{" ".join(edge)}"/>'
    if len(points) > 1:
        body += path("line faint", means) + path("line", smoothed(means)) if smooth else path("line", means)
    if len(points) <= 30 and not smooth:
        for x, y in means:
            body += (
                f'<circle class="dot c{colour % COLOURS}" cx="{place.across(x):.1f}" cy="{place.up(y):.1f}" r="2.5"/>'
            )
    return body


def _pointed(drawn: Mapping[str, tuple[Series, int]], x_name: str, place: Axes) -> str:
    """Draw hover strips that show a line and the last value of each series in the strip."""
    xs = sorted({x for points, _ in drawn.values() for x, _ in points})
    every = -(-len(xs) // STRIPS)
    ends = [xs[min(i + every, len(xs)) - 1] for i in range(0, len(xs), every)]
    edges = [place.left, *((a + b) / 2 for a, b in pairwise(ends)), place.right]
    entries: list[dict[str, float]] = [{} for _ in ends]
    for name, (points, _) in drawn.items():
        for x, y in points:
            entries[bisect_left(ends, x)][name] = y
    names = {name: f"{escape(name)} " if len(drawn) < 3 else "" for name in drawn}  # more are distinguished by colour
    body = ""
    for end, begin, until, values in zip(ends, edges[:-1], edges[1:], entries, strict=True):
        at, first, last = place.across(end), place.across(begin), place.across(until)
        labels = "".join(
            f'<tspan class="c{drawn[name][1] % COLOURS}" dx="7">{names[name]}{number(float(f"{value:.4g}"))}</tspan>'
            for name, value in values.items()
        )
        side, x = ("start", LEFT) if at < WIDTH / 2 else ("end", WIDTH - RIGHT)
        body += (
            f'<g class="at"><rect x="{first:.1f}" y="{-ABOVE}" width="{max(last - first, 0.5):.1f}" '
            f'height="{HEIGHT + ABOVE}"/><path d="M{at:.1f} 0V{HEIGHT}"/><text x="{x}" y="-7" text-anchor="{side}">'
            f"{escape(x_name)} {number(end)}{labels}</text></g>"
        )
    return body


def grid(levels: Sequence[float], place: Axes, below: Sequence[float] | None = None) -> str:
    """Draw horizontal grid lines with numbers, and x numbers: at both ends and between, or at `below`."""
    body = ""
    spacing = min((b - a for a, b in pairwise(levels)), default=1.0)
    digits = max(0, 1 - math.floor(math.log10(spacing)))  # enough to distinguish neighbouring numbers
    for level in levels:
        y = place.up(level)
        text = number(round(level, digits)) if abs(level) > 1e-12 else "0"
        body += f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        body += f'<text x="{LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    room = 34 / (WIDTH - LEFT - RIGHT) * (place.right - place.left)  # between two numbers
    inner = [x for x in ticks(place.left, place.right) if place.left + room < x < place.right - room]
    end = -math.inf  # right end of the previous number
    for x in below or (place.left, *inner, place.right):
        if place.across(x) < end:
            continue
        end = place.across(x) + 30
        text = number(float(f"{x:.6g}"))
        anchor = "end" if x == place.right else "middle"
        at = place.across(x) + (RIGHT if x == place.right else 0)
        body += f'<text x="{at:.1f}" y="{HEIGHT + BELOW - 3}" text-anchor="{anchor}">{text}</text>'
    return body + f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT}" y2="{HEIGHT}"/>'


def bars(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    unit: str = "",
    format_value: Callable[[float], str] = seconds,
    shares: bool = False,
) -> str:
    """Draw a stacked bar per row, with values formatted by `format_value`. `colours`: part -> class. `shares`: bars of
    equal length that show each part's share."""
    if not rows:
        return ""
    longest = max(sum(parts.values()) for parts in rows.values()) or 1.0
    body, used = "", set()
    for name, parts in rows.items():
        cells, most = "", (sum(parts.values()) or 1.0) if shares else longest
        for part, value in parts.items():
            if value / most >= 0.0005:
                tip = escape(f"{name}: {part} {format_value(value)}{unit}")
                used.add(part)
                cells += f'<i class="{colours[part]}" style="width:{value / most * 100:.2f}%" title="{tip}"></i>'
        body += bar(name, cells, format_value(sum(parts.values())) + unit)
    parts_used = [part for part in colours if part in used]
    legend = _legend(parts_used, [colours[part] for part in parts_used])
    table = "".join(f"<th>{escape(part)}</th>" for part in ("", *parts_used))
    for name, parts in rows.items():
        cells = "".join(f"<td>{escape(format_value(parts[part])) if part in parts else ''}</td>" for part in parts_used)
        table += f"</tr><tr><td>{escape(name)}</td>{cells}"
    table = folded(f'<div class="scroll"><table><tr>{table}</tr></table></div>')
    return wide_figure(title, f'<div class="bars">{body}</div>{table}', legend)


def bar(name: str, cells: str, value: str) -> str:
    """Return the markup of one bar: its name, parts and total."""
    name = escape(name)
    return f'<b title="{name}">{name}</b><div class="bar">{cells}</div><span>{escape(value)}</span>'


def heat(title: str, rows: Mapping[str, Sequence[float]], ends: tuple[str, str], says: str) -> str:
    """Draw a heat map with one row per name: 1.0 is normal, without colour; 2.0 and more has the full colour."""
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
    return wide_figure(title, f'<div class="bars two">{body}</div>')


def timeline(
    title: str,
    spans: Sequence[tuple[float, float, str]],
    marks: Mapping[str, Sequence[tuple[float, str]]],
    colours: Mapping[str, str],
    begun: str,
) -> str:
    """Time line of spans (begin, end, label; unix seconds), with rows of marks (time, label) below; `colours` maps a
    row to its class. Pauses between spans have a fixed width and a label with their duration."""
    if not spans:
        return ""
    total = sum(max(end - begin, 1e-3) for begin, end, _ in spans)
    pause = min(14.0, 50 / len(spans)) if len(spans) > 1 else 0.0
    scale = (100 - pause * (len(spans) - 1)) / total  # per cent a second
    places: list[tuple[float, float, float]] = []  # (begin, end, offset from the left in per cent)
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
    for name, marked in marks.items():
        dots = ""
        for when, what in marked:
            place = next((p for p in places if p[0] <= when <= p[1]), None)
            if place is not None:
                left = place[2] + (when - place[0]) * scale
                dots += f'<i class="{colours[name]}" style="left:{left:.2f}%" title="{escape(what)}"></i>'
        body += f'<b>{escape(name)}</b><div class="marks">{dots}</div>'
    body += f"<b></b><p><span>{escape(begun)}</span><span>{seconds(total)} in all</span></p>"
    return wide_figure(title, f'<div class="bars two">{body}</div>')


def _class(place: int) -> str:
    return f"c{place % COLOURS}{' dashed' if place >= COLOURS else ''}"


def _legend(names: Sequence[str], colours: Sequence[str]) -> str:
    return "".join(
        f'<span><i class="{colour}"></i>{escape(name)}</span>' for name, colour in zip(names, colours, strict=True)
    )


def figure(title: str, body: str, x_name: str, legend: str = "", table: str = "") -> str:
    """Return the markup of a plot with the name of its x axis."""
    name = escape(title)
    legend = f'<div class="legend">{legend}</div>' if legend else ""
    body += f'<text x="{WIDTH - RIGHT}" y="{HEIGHT + BELOW + 13}" text-anchor="end">{escape(x_name)}</text>'
    box = f"0 {-ABOVE} {WIDTH} {HEIGHT + ABOVE + BELOW + 16}"
    return (
        f"<figure><figcaption>{name}</figcaption>{legend}"
        f'<svg class="chart" viewBox="{box}" role="img" aria-label="{name}">{body}</svg>{table}</figure>'
    )


def wide_figure(title: str, body: str, legend: str = "") -> str:
    legend = f'<div class="legend">{legend}</div>' if legend else ""
    return f'<figure class="wide"><figcaption>{escape(title)}</figcaption>{legend}{body}</figure>'
