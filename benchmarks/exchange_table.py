"""Bytes and messages of the exact exchange, flat and in stages, beside a ring all-reduce, for 2 to 1,024 ranks; and a
plot of them.

In: nothing, or ranks of a host and micro-batches. Out: a Markdown table and, asked for, an SVG. They are counted from
the schedules that the strategies send by (`strategies/exact/reduce_schedule.py`), of which
`tests/strategies/test_reduce_schedule.py` counts real messages.
A ring all-reduce sends 2 (W-1) messages a rank and bucket, 2 (W-1)/W of its bytes.
Example: python benchmarks/exchange_table.py --plot docs/images/exchange.svg
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.strategies.exact.gradient_sum import layout_of
from lockstep.strategies.exact.reduce_schedule import ReduceSchedule
from lockstep.track.report import charts

RANKS = (2, 3, 4, 6, 8, 16, 32, 64, 96, 100, 128, 256, 512, 1000, 1024)


@dataclass(frozen=True)
class Cost:
    """Cost of a bucket: reduced, and sent back to all ranks."""

    messages: int  # over all ranks
    most: float  # buckets sent by the busiest rank; a bucket has the bytes of a whole gradient
    mean: float  # of all ranks
    between: float  # over all ranks


def in_stages(leaves: int, ranks: int, a_host: int) -> Cost:
    """Count the messages of `Exchange` along a schedule, reduction and return."""
    hosts = tuple(f"host-{rank // a_host}" for rank in range(ranks))
    found, sent, messages, between = ReduceSchedule(leaves, layout_of(leaves, ranks), hosts), [0.0] * ranks, 0, 0.0
    for rank in range(ranks):
        for stage in found.stages(rank):
            back = stage.rows / ranks  # to each rank that it received from
            up = [(peer, len(stage.nodes) * (rows.stop - rows.start) / ranks) for peer, rows in stage.sends]
            every = [*up, *((peer, back) for peer, _ in stage.receives)]
            messages += len(every)
            sent[rank] += sum(size for _, size in every)
            between += sum(size for peer, size in every if hosts[peer] != hosts[rank])
    return Cost(messages, max(sent), sum(sent) / ranks, between)


def flat(leaves: int, ranks: int, a_host: int) -> Cost:
    """Count one all-to-all and a ring all-gather."""
    nodes, away = [len(held) for held in layout_of(leaves, ranks)], 0.0
    for rank, held in enumerate(nodes):
        mine = range(first := rank // a_host * a_host, min(first + a_host, ranks))
        away += held * (ranks - len(mine)) / ranks + (rank == mine[-1] and ranks > a_host) * (ranks - 1) / ranks
    sent = [(held + 1) * (ranks - 1) / ranks for held in nodes]
    return Cost(2 * ranks * (ranks - 1), max(sent), sum(sent) / ranks, away)


def ring(ranks: int, a_host: int) -> Cost:
    hosts = -(-ranks // a_host)
    once = 2 * (ranks - 1) / ranks
    return Cost(2 * ranks * (ranks - 1), once, once, once * hosts if hosts > 1 else 0.0)


def leaves_of(ranks: int, least: int) -> int:
    """Number of micro-batches: a power of two."""
    while least < ranks:
        least *= 2
    return least


def table(a_host: int, least: int) -> list[str]:
    lines = [
        "| ranks | micro-batches | messages: flat, ring | in stages | sent by a rank: ring | flat | in stages | most | "
        "between hosts: ring | flat | in stages |",
        "|" + " ---: |" * 11,
    ]
    for ranks in RANKS:
        leaves = leaves_of(ranks, least)
        one, two, three = flat(leaves, ranks, a_host), in_stages(leaves, ranks, a_host), ring(ranks, a_host)
        numbers = [three.mean, one.mean, two.mean, two.most, three.between, one.between, two.between]
        told = " | ".join(f"{number:.2f}" for number in numbers)
        lines.append(f"| {ranks:,} | {leaves:,} | {one.messages:,} | {two.messages:,} | {told} |")
    return lines


# The report's colours, inlined: style sheets of a page do not apply to an image.
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #57606a }
.grid, .axis { stroke: #d0d7de }
.c0 { fill: #2563eb; stroke: #2563eb } .c1 { fill: #c2410c; stroke: #c2410c } .c2 { fill: #15803d; stroke: #15803d }
.line { fill: none; stroke-width: 1.6 }
.dot { stroke: none }
@media (prefers-color-scheme: dark) { text { fill: #9aa4ae } .grid, .axis { stroke: #3d444d } }
"""


def plot(a_host: int, least: int) -> str:
    """Draw two charts of growth with the number of ranks, side by side in one SVG."""
    counted = [(math.log2(n), n, leaves_of(n, least)) for n in RANKS]
    stages = [(x, in_stages(leaves, n, a_host)) for x, n, leaves in counted]
    plain = [(x, flat(leaves, n, a_host)) for x, n, leaves in counted]
    rings = [(x, ring(n, a_host)) for x, n, _ in counted]
    names = {"flat": plain, "in stages": stages, "ring all-reduce": rings}
    messages = {n: [(x, float(c.messages)) for x, c in found] for n, found in names.items() if found is not rings}
    between = {n: [(x, c.between) for x, c in found if c.between] for n, found in names.items()}
    drawn = ""
    for place, (title, series) in enumerate(
        {
            "messages of a bucket, all ranks (flat: as a ring)": messages,
            "sent between hosts, in gradients": between,
        }.items()
    ):
        look = charts.ChartStyle(x_name="log2 of ranks", colours={name: i for i, name in enumerate(names)})
        inside = charts.lines(title, series, look).partition("<svg")[2].partition(">")[2].partition("</svg>")[0]
        inside = re.sub(r'<g class="at".*?</g>', "", inside, flags=re.DOTALL)
        keys = "".join(
            f'<rect class="c{list(names).index(name)}" x="{44 + 85 * i}" y="-24" width="9" height="9"/>'
            f'<text x="{57 + 85 * i}" y="-16">{name}</text>'
            for i, name in enumerate(series)
        )
        drawn += f'<g transform="translate({380 * place} 50)"><text x="44" y="-34">{title}</text>{keys}{inside}</g>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-25 0 765 270"><style>{STYLE}</style>{drawn}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a-host", type=int, default=8, help="ranks of a host")
    parser.add_argument("--micro-batches", type=int, default=8, help="at least; a power of two from ranks on")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    print("\n".join(table(args.a_host, args.micro_batches)))
    if args.plot:
        args.plot.write_text(plot(args.a_host, args.micro_batches))


if __name__ == "__main__":
    main()
