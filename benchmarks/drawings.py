"""The drawings of docs/tutorials/lesson.md, each as SVG for light and for dark pages.

In: nothing. Out: docs/images/lesson-{ranks,data,model,all-reduce,means}-{light,dark}.svg.
Example: python benchmarks/drawings.py
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent.parent / "docs/images"
# background, text, dim, then colours of ranks 0 to 3
THEMES = {
    "light": ("#ffffff", "#1f2328", "#59636e", ("#4051b5", "#0f7b6c", "#b35900", "#a0307a")),
    "dark": ("#0d1117", "#f0f6fc", "#9198a1", ("#8c9eff", "#4fd1b8", "#f0a35e", "#f08cc8")),
}
WIDTH = 760


class Drawing:
    """Shapes on a page of one theme."""

    def __init__(self, theme: str) -> None:
        self.back, self.fore, self.dim, self.ranks = THEMES[theme]
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = "",
        size: int = 14,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{colour or self.fore}" font-size="{size}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def box(
        self, x: float, y: float, w: float, h: float, colour: str = "", label: str = "", fill: float = 0.12, r: int = 6
    ) -> None:
        colour = colour or self.dim
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r}" fill="{colour}" fill-opacity="{fill}" '
            f'stroke="{colour}"/>'
        )
        if label:
            self.text(x + w / 2, y + h / 2 + 5, label)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = "") -> None:
        colour = colour or self.dim
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        left, right = (x2 - 9 * ux + 4 * uy, y2 - 9 * uy - 4 * ux), (x2 - 9 * ux - 4 * uy, y2 - 9 * uy + 4 * ux)
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2 - 7 * ux:g}" y2="{y2 - 7 * uy:g}" stroke="{colour}" '
            f'stroke-width="1.5"/><polygon points="{x2:g},{y2:g} {left[0]:.1f},{left[1]:.1f} {right[0]:.1f},'
            f'{right[1]:.1f}" fill="{colour}"/>'
        )

    def svg(self, title: str, height: int) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'font-family="system-ui,sans-serif" role="img"><title>{escape(title)}</title>'
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{self.back}"/>{"".join(self.parts)}</svg>\n'
        )


def ranks(theme: str) -> str:
    d = Drawing(theme)
    for machine in range(2):
        x = 30 + machine * 365
        d.box(x, 20, 335, 150, d.dim, fill=0.04, r=10)
        d.text(x + 167, 44, f"machine {'AB'[machine]}", d.dim, bold=True)
        for local in range(2):
            rank, left = 2 * machine + local, x + 20 + local * 155
            d.box(left, 58, 140, 94, d.ranks[rank])
            d.text(left + 70, 82, f"rank {rank}", d.ranks[rank], 18, bold=True)
            d.text(left + 70, 106, f"local rank {local}")
            d.text(left + 70, 128, f"GPU {local} of machine {'AB'[machine]}", d.dim, 12)
    d.text(WIDTH / 2, 200, "world size 4: four processes, two on each of two machines")
    return d.svg("Ranks, local ranks and the world size of four processes on two machines", 220)


def data(theme: str) -> str:
    d = Drawing(theme)
    for rank in range(2):
        y, colour = 40 + rank * 110, d.ranks[rank]
        d.text(30, y + 30, f"rank {rank}", colour, 16, "start", bold=True)
        for each in range(4):
            d.box(100 + each * 34, y + 8, 28, 34, colour, str(4 * rank + each))
        d.arrow(242, y + 25, 280, y + 25)
        d.box(282, y, 120, 50, colour, "whole model")
        d.arrow(404, y + 25, 442, y + 25)
        d.box(444, y, 74, 50, colour, f"g{rank}")
        d.arrow(520, y + 25, 566, 104 + (12 if rank else -6), colour)
        d.arrow(640, 104 + (12 if rank else -6), 672, y + 25, colour)
        d.box(674, y, 70, 50, colour, "update")
    d.box(568, 82, 70, 50, d.dim, "g0 + g1")
    d.text(168, 30, "examples", d.dim, 12)
    d.text(481, 30, "gradient", d.dim, 12)
    d.text(603, 74, "all-reduce", d.dim, 12)
    d.text(WIDTH / 2, 232, "data parallelism: other examples, the same model, one gradient")
    return d.svg("Data parallelism: each rank has the whole model and other examples", 252)


def model(theme: str) -> str:
    d = Drawing(theme)
    titles = ("sharding: fsdp2, zero", "pipeline: layers", "tensor parallel: matrices")
    for column, title in enumerate(titles):
        x = 20 + column * 248
        d.box(x, 20, 224, 190, d.dim, fill=0.04, r=10)
        d.text(x + 112, 46, title, bold=True)
        for layer in range(4):
            y = 62 + layer * 28
            if column == 0:
                for rank in range(2):
                    d.box(x + 32 + rank * 80, y, 76, 22, d.ranks[rank])
            elif column == 1:
                d.box(x + 32, y, 156, 22, d.ranks[layer // 2])
            else:
                for rank in range(2):
                    d.box(x + 32, y + rank * 11, 156, 10, d.ranks[rank], r=2)
        under = ("each keeps a part, fetches the rest", "one example passes through both", "both compute each product")
        d.text(x + 112, 196, under[column], d.dim, 12)
    for rank in range(2):
        d.box(268 + rank * 130, 226, 16, 16, d.ranks[rank], r=3)
        d.text(290 + rank * 130, 239, f"held by rank {rank}", size=13, anchor="start")
    return d.svg("Three ways to cut a model of four layers between two ranks", 260)


def all_reduce(theme: str) -> str:
    d = Drawing(theme)
    columns = (40, 300, 560)
    for x, title in zip(columns, ("before", "after reduce-scatter", "after all-gather"), strict=True):
        d.text(x + 80, 32, title, d.dim, 13, bold=True)
    for rank in range(2):
        y, colour, other = 50 + rank * 84, d.ranks[rank], d.ranks[1 - rank]
        d.text(columns[0] - 12, y + 36, str(rank), colour, 16, bold=True)
        for half in range(2):
            d.box(columns[0] + half * 82, y, 78, 56, colour, f"{'ab'[half]}{rank}")
            if half == rank:
                d.box(columns[1] + half * 82, y, 78, 56, colour, f"{'ab'[half]}0+{'ab'[half]}1", 0.3)
            else:
                d.box(columns[1] + half * 82, y, 78, 56, d.dim, fill=0.03)
            d.box(
                columns[2] + half * 82,
                y,
                78,
                56,
                colour if half == rank else other,
                f"{'ab'[half]}0+{'ab'[half]}1",
                0.3,
            )
    for x in (columns[0] + 168, columns[1] + 168):
        d.arrow(x, 96, x + 86, 152)
        d.arrow(x, 152, x + 86, 96)
    d.text(251, 62, "half a gradient", d.dim, 12)
    d.text(511, 62, "half a gradient", d.dim, 12)
    d.text(
        WIDTH / 2,
        232,
        "all-reduce: every rank ends with the sum, and has sent less than two gradients, however many ranks",
    )
    return d.svg("An all-reduce of two ranks as a reduce-scatter and an all-gather", 252)


def means(theme: str) -> str:
    d = Drawing(theme)
    for rank, (count, total) in enumerate(((90, 180), (10, 50))):
        y, colour = 30 + rank * 64, d.ranks[rank]
        d.text(30, y + 28, f"rank {rank}", colour, 16, "start", bold=True)
        d.box(100, y + 6, count * 3.2, 32, colour)
        d.text(110 + count * 3.2, y + 28, f"{count} tokens, sum {total}, mean {total / count:.1f}", anchor="start")
    d.box(100, 164, 270, 56, d.dim, fill=0.04)
    d.text(235, 187, "mean of the means", bold=True)
    d.text(235, 208, "(2.0 + 5.0) / 2 = 3.5: wrong")
    d.box(400, 164, 290, 56, d.ranks[0])
    d.text(545, 187, "sums first, one division", bold=True)
    d.text(545, 208, "(180 + 50) / (90 + 10) = 2.3")
    return d.svg("The mean of two ranks' means is not the mean over their tokens", 240)


DRAWINGS: dict[str, Callable[[str], str]] = {
    "ranks": ranks,
    "data": data,
    "model": model,
    "all-reduce": all_reduce,
    "means": means,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        for theme in THEMES:
            (IMAGES / f"lesson-{name}-{theme}.svg").write_text(draw(theme), encoding="utf-8")
