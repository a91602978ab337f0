"""What grows with what: processor time and memory against processes, micro-batches, parameters, examples and ranks.

In: nothing. Out: a line of JSON a point in --out, which a later call goes on with; `page`: of such lines
results/growth.md and docs/images/growth-{light,dark}.svg. Every point is measured in a process of its own,
one thread a rank, in processor time (of all ranks together), since a clock says little beside other work.

  python benchmarks/growth.py measure --out FILE     all points; `--axes processes ranks` some of them
  python benchmarks/growth.py page FILE

Axes:
  processes     1 to 8 of the machine's own, a step of the same examples, under ddp and fsdp2
  micro_batches 1 to 1,024 of the same 1,024 examples of one length, on one process
  parameters    10^6 to 5 x 10^8: a step of few tokens, and the highest resident memory
  examples      10^4 to 10^8: `data_scale.py index`
  ranks         1 to 4,096 simulated ones, a micro-batch each: `tests/support/simulated.py`
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
PAGE = ROOT / "benchmarks/results/growth.md"
POINTS: dict[str, list[int]] = {
    "processes": [1, 2, 4, 8],
    "micro_batches": [1, 4, 16, 64, 256, 1024],
    "parameters": [10**6, 10**7, 10**8, 5 * 10**8],
    "examples": [10**4, 10**5, 10**6, 10**7, 10**8],
    "ranks": [1, 4, 16, 64, 256, 1024, 4096],
}
STEPS = 5  # the median of these is reported


# -- points ----------------------------------------------------------------------------------------------------------


def _texts(folder: Path, rows: int) -> Path:
    """Write rows of sixteen words, each one token: all of equal length."""
    draw, words = random.Random(0), [f"{a}{b}" for a in "bdfgklmn" for b in "aeiou"]
    for split, count in (("train", rows), ("validation", 8)):
        lines = (
            json.dumps({"text": " ".join(draw.choices(words, k=16)), "label": draw.choice(["no", "yes"])}) + "\n"
            for _ in range(count)
        )
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def _run(folder: Path, batch_size: int, micro_batches: int, *words: str, **model: int) -> Any:
    from lockstep.config.run import load

    config = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 32} | model
    values = {
        "output": str(folder / "out"),
        "data": {"source": str(_texts(folder, max(2 * batch_size, 64))), "max_length": 32, "decontaminate": False},
        "task": {"name": "classification"},
        "model": {"type": "gpt2", "config": config},
        "tokenizer": {"train": "bpe", "vocab_size": 400},
        "steps": 1000,
        "batch_size": batch_size,
        "micro_batches": micro_batches,
        "optim": {"max_grad_norm": 1.0},
        "launch": {"device": "cpu", "threads": 1},
    }
    return load(None, list(words), values)


def _steps(world: Any, run: Any) -> list[float]:
    """CPU time of some steps on this rank, after two warm-up steps."""
    from lockstep.distributed.system_metrics import keep_freed_memory
    from lockstep.training.data_loader import StepLoader
    from support.harness import build

    task, strategy = build(run, world)
    keep_freed_memory()
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    times = []
    for number in range(2 + STEPS):
        batch = feed.make(number)
        before = time.process_time()
        strategy.train_step(batch, 1e-4)
        times.append(time.process_time() - before)
    strategy.close()
    return times[2:]


def processes(count: int, folder: Path) -> dict[str, float]:
    from support.harness import run_on

    found = {}
    for name, words in {"ddp": (), "fsdp2": ("strategy.options.gather=micro_batch",)}.items():
        run = _run(folder, 64, 8, f"strategy.name={name}", *words, n_layer=4, n_embd=256)
        ranks = run_on(count, _steps, run, run=run, timeout_s=1800)
        found[f"{name}_s"] = statistics.median(map(sum, zip(*ranks, strict=True)))
    return found


def _alone(run: Any) -> float:
    from lockstep.distributed.world import World

    return statistics.median(_steps(World(run).join(), run))


def micro_batches(count: int, folder: Path) -> dict[str, float]:
    return {"step_s": _alone(_run(folder, 1024, count, "strategy.name=single"))}


def parameters(count: int, folder: Path) -> dict[str, float]:
    """Measure a model with twelve layers of 12 w^2 weights each, and an embedding of 432 rows."""
    width = max(64, round(math.sqrt(count / (12 * 12)) / 64) * 64)
    layers = max(1, round((count - 432 * width) / (12 * width * width)))
    _alone(_run(folder, 2, 1, "strategy.name=single"))  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = _run(folder, 2, 1, "strategy.name=single", n_layer=layers, n_embd=width)
    seconds = _alone(run)
    weights = 12 * layers * width * width + 432 * width
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"step_s": seconds, "weights": weights, "bytes_a_weight": 1024 * highest / weights}


def examples(count: int, folder: Path) -> dict[str, float]:
    command = [sys.executable, str(ROOT / "benchmarks/data_scale.py"), "index", "--rows", str(count)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(folder)})
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: found[name] for name in ("start_ms", "step_0_ms", "step_1e9_ms", "mib_start", "mib_steps")}


def ranks(count: int, folder: Path) -> dict[str, float]:
    import torch

    from support.own_modules import job
    from support.simulated import SMALL, Job, on_ranks

    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    trained = Job(job(folder, SMALL, f"micro_batches={count}", f"batch_size={count + 3}", "strategy.name=allreduce"))
    on_ranks(trained.run, ["host"], trained)  # imports
    hosts = [f"host-{rank // 8}" for rank in range(count)]
    before = time.process_time()
    _, traffic = on_ranks(trained.run, hosts, trained)
    took = time.process_time() - before
    by_rank: dict[int, int] = {}
    for (sender, _), sent in traffic.bytes.items():
        by_rank[sender] = by_rank.get(sender, 0) + sent
    return {
        "ms_a_rank": 1e3 * took / count,
        "messages_a_rank": sum(traffic.messages.values()) / count,
        "bytes_a_rank": sum(traffic.bytes.values()) / count,
        "most_bytes": max(by_rank.values(), default=0),
    }


AXES: dict[str, Callable[[int, Path], dict[str, float]]] = {
    "processes": processes,
    "micro_batches": micro_batches,
    "parameters": parameters,
    "examples": examples,
    "ranks": ranks,
}


def point(axis: str, value: int) -> None:
    """Measure one point in this process, and print a line."""
    sys.path.insert(0, str(ROOT / "tests"))
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("LOCKSTEP_CACHE", f"{name}/cache")
        print(json.dumps({"axis": axis, "value": value} | AXES[axis](value, Path(name))))


def measure(axes: Sequence[str], out: Path) -> None:
    import torch

    known = {(line["axis"], line["value"]) for line in _read(out)} if out.exists() else set()
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    for axis in axes:
        for value in POINTS[axis]:
            if (axis, value) in known:
                continue
            done = subprocess.run(
                [sys.executable, __file__, "point", axis, str(value)], stdout=subprocess.PIPE, check=True
            )
            line = json.loads(done.stdout.splitlines()[-1])
            line |= about | {"date": datetime.now(UTC).date().isoformat(), "load": round(os.getloadavg()[0], 1)}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- charts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of a chart: a measure against an axis."""

    measure: str
    label: str
    unit: float = 1.0  # factor for display


@dataclass(frozen=True)
class Chart:
    axis: str
    title: str
    lines: tuple[Line, ...]
    why: str  # reason of its growth


CHARTS = (
    Chart(
        "processes",
        "processor ms a step, all processes together",
        (Line("ddp_s", "ddp", 1e3), Line("fsdp2_s", "fsdp2", 1e3)),
        "The same eight micro-batches are computed whoever does it, so the sum over processes should stay as it is. "
        "What is added is each process's own part: its update of all weights (`ddp`) or of its share (`fsdp2`), and "
        "the exchange of partial sums, which a process pays for what it sends and receives.",
    ),
    Chart(
        "micro_batches",
        "processor ms a step of 1,024 examples",
        (Line("step_s", "single", 1e3),),
        "Flat while a micro-batch has enough tokens to fill a product, then a straight line: each further "
        "micro-batch costs its own calls of Python and torch, a gradient that is written and one addition in the "
        "tree, however few tokens it has: {each:.1f} ms with this model of two layers.",
    ),
    Chart(
        "parameters",
        "processor ms a step of 2 examples, against weights",
        (Line("step_s", "step", 1e3),),
        "With few tokens a step is memory traffic: each weight is read twice and its gradient written once in the "
        "pass, then AdamW reads and writes weight and two moments. Once the weights no longer fit the cache the "
        "slope nears 1: {nanoseconds:.1f} ns for each further weight.",
    ),
    Chart(
        "parameters",
        "highest memory, bytes a weight",
        (Line("bytes_a_weight", "single"),),
        "float32 weight, gradient and two moments are 16 bytes. What a small model has above that are activations "
        "and torch's own buffers, which do not grow with it.",
    ),
    Chart(
        "examples",
        "processor ms of a start and of a step's data",
        (Line("start_ms", "start"), Line("step_0_ms", "step 0"), Line("step_1e9_ms", "step 10^9")),
        "The order is a function of seed and step, so a start reads the index of shards and no order, and step 10^9 "
        "costs what step 0 does. A step's 256 examples lie in more shards the more there are, up to one each: that "
        "is the bend.",
    ),
    Chart(
        "ranks",
        "of a simulated rank, in three steps",
        (Line("ms_a_rank", "processor ms"), Line("messages_a_rank", "messages sent")),
        "One micro-batch a rank, eight ranks a host. A rank computes the same whatever the world is; the messages "
        "that it sends are those of its place in the tree, and hosts add up before they send to others: four times "
        "the ranks are 12 messages more in three steps. Of the processor time that grows the messages are a part; the "
        "simulation, in which ranks take turns in one process, is another, and the two were not taken apart.",
    ),
)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Log-log slope of the last two points: 0 is constant, 1 proportional."""
    (x, y), (end_x, end_y) = points[-2:]
    return math.log(end_y / y) / math.log(end_x / x)


def per_unit(points: Sequence[tuple[float, float]]) -> float:
    """Marginal cost at the end of the axis."""
    (x, y), (end_x, end_y) = points[-2:]
    return (end_y - y) / (end_x - x)


def points_of(lines: Sequence[dict[str, Any]], chart: Chart, line: Line) -> list[tuple[float, float]]:
    return [
        (float(each.get("weights", each["value"])), each[line.measure] * line.unit)
        for each in lines
        if each["axis"] == chart.axis and each.get(line.measure)
    ]


def _picture(lines: Sequence[dict[str, Any]], theme: str) -> str:
    from pictures import THEMES

    back, fore, dim, red, green, blue, _ = THEMES[theme]
    width, height, columns = 420, 270, 2
    panels = []
    for place, chart in enumerate(CHARTS):
        x0, y0 = place % columns * width, place // columns * height
        drawn = [points_of(lines, chart, line) for line in chart.lines]
        flat = [point for points in drawn for point in points]
        if not flat:
            continue
        low_x, high_x = math.log10(min(x for x, _ in flat)), math.log10(max(x for x, _ in flat))
        low_y = math.floor(math.log10(min(y for _, y in flat)))
        high_y = max(math.ceil(math.log10(max(y for _, y in flat))), low_y + 1)

        def at(x: float, y: float, box: tuple[float, float, float, float] = (low_x, high_x, low_y, high_y)) -> str:
            left, right, low, high = box
            across = x0 + 56 + (math.log10(x) - left) / (right - left or 1) * 220  # noqa: B023 - called here
            up = y0 + 230 - (math.log10(y) - low) / (high - low) * 180  # noqa: B023
            return f"{across:.1f},{up:.1f}"

        parts = [f'<text x="{x0 + 16}" y="{y0 + 24}" fill="{fore}" font-weight="bold">{escape(chart.title)}</text>']
        for power in range(low_y, high_y + 1):
            end = at(10**low_x, 10.0**power).split(",")[1]
            parts.append(f'<path d="M{x0 + 56},{end}h220" stroke="{dim}" stroke-opacity="0.3"/>')
            parts.append(
                f'<text x="{x0 + 50}" y="{float(end) + 4}" fill="{dim}" text-anchor="end">{10.0**power:g}</text>'
            )
        for x in (flat[0][0], drawn[0][-1][0]):
            across = at(x, 10.0**low_y).split(",")[0]
            parts.append(f'<text x="{across}" y="{y0 + 250}" fill="{dim}" text-anchor="middle">{_short(x)}</text>')
        for colour, line, points in zip((blue, red, green), chart.lines, drawn, strict=False):
            if not points:
                continue
            parts.append(
                f'<path d="M{" L".join(at(*p) for p in points)}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            for point in points:
                across, up = at(*point).split(",")
                title = f"<title>{_short(point[0])}: {point[1]:.3g}</title>"
                parts.append(f'<circle cx="{across}" cy="{up}" r="3.5" fill="{colour}">{title}</circle>')
            row = y0 + 70 + 40 * list(chart.lines).index(line)
            parts.append(f'<text x="{x0 + 288}" y="{row}" fill="{colour}">{escape(line.label)}</text>')
            parts.append(
                f'<text x="{x0 + 288}" y="{row + 16}" fill="{dim}">slope {slope(points):.2f} at the end</text>'
            )
        panels.append("".join(parts))
    full = height * -(-len(CHARTS) // columns)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * columns} {full}" '
        f'font-family="system-ui,sans-serif" font-size="12" role="img"><title>What grows with what</title>'
        f'<rect width="{width * columns}" height="{full}" rx="8" fill="{back}"/>{"".join(panels)}</svg>\n'
    )


def _short(x: float) -> str:
    return f"{x:,.0f}" if x < 10**5 else f"{x:.1e}".replace("e+0", "e").replace(".0e", "e")


def _figure(value: float) -> str:
    """Format with three digits and no exponent."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value else 0
    return f"{round(value, digits if value < 100 else 2 - math.floor(math.log10(value))):,.{digits}f}"


def _why(lines: Sequence[dict[str, Any]], chart: Chart) -> str:
    """Explanations, with the figures that they name."""
    more = per_unit(points_of(lines, chart, chart.lines[0]))
    return "\n".join(textwrap.wrap(chart.why.format(each=more, nanoseconds=more * 1e6), 118))


def _table(lines: Sequence[dict[str, Any]], chart: Chart) -> list[str]:
    names = [line.label for line in chart.lines]
    rows = [f"| {chart.axis.replace('_', '-')} | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for each in (each for each in lines if each["axis"] == chart.axis):
        values = (each[line.measure] * line.unit for line in chart.lines)
        rows.append(f"| {_short(each.get('weights', each['value']))} | {' | '.join(map(_figure, values))} |")
    slopes = (slope(points_of(lines, chart, line)) for line in chart.lines)
    return [*rows, f"| slope at the end | {' | '.join(f'{s:.2f}' for s in slopes)} |"]


def page(path: Path) -> None:
    lines = sorted(_read(path), key=lambda line: (line["axis"], line["value"]))
    for theme in ("light", "dark"):
        (IMAGES / f"growth-{theme}.svg").write_text(_picture(lines, theme))
    dates = sorted({line["date"] for line in lines})
    loads = sorted(line["load"] for line in lines)
    text = [
        "# What grows with what",
        "",
        "How processor time and memory grow with processes, micro-batches, parameters, examples and ranks. Both axes",
        "of each chart are logarithmic; a slope of 0 is flat, of 1 in proportion. One thread a process; the median",
        f"of five steps after two; {lines[0]['cores']} cores of an AMD EPYC virtual machine without a GPU,",
        f"torch {lines[0]['torch']}, {' and '.join(dates)}, with other work beside (load {loads[0]:g} to",
        f"{loads[-1]:g}), so that seconds of the clock are not shown. Made by `python benchmarks/growth.py`",
        f"([lines]({path.name})).",
        "",
        "![Charts of the tables below](../../docs/images/growth-light.svg)",
    ]
    for chart in CHARTS:
        title = chart.title[0].upper() + chart.title[1:]
        text += ["", f"## {title}", "", _why(lines, chart), "", *_table(lines, chart)]
    PAGE.write_text("\n".join(text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("measure")
    measured.add_argument("--axes", nargs="+", choices=POINTS, default=list(POINTS))
    measured.add_argument("--out", type=Path, required=True)
    one = commands.add_parser("point")
    one.add_argument("axis", choices=POINTS)
    one.add_argument("value", type=int)
    commands.add_parser("page").add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        measure(arguments.axes, arguments.out)
    elif arguments.command == "point":
        point(arguments.axis, arguments.value)
    else:
        page(arguments.file)


if __name__ == "__main__":
    main()
