"""The charts of a report: curves, time per phase, time line, memory, costs, predictions.

In: histories, and a task's tables per split (tables.json). Out: markup, and numbers for tables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from lockstep.track.console import LOG
from lockstep.track.history import History
from lockstep.track.report import charts
from lockstep_trace.coded import quantity

# title of a chart -> (name of a line -> (split, key in metrics.jsonl))
_CURVES: dict[str, dict[str, tuple[str, str]]] = {
    "loss": {"train": ("train", "loss"), "validation": ("validation", "loss")},
    "learning rate": {"rate": ("train", "learning_rate")},
    "gradient norm, before clipping": {"norm": ("train", "grad_norm")},
    "examples per second": {"examples": ("train", "examples_per_s")},
    "tokens per second": {"tokens": ("train", "tokens_per_s")},
    "model FLOPs utilization (MFU), share of the GPUs' rate": {"MFU": ("train", "mfu")},
    "padding: tokens computed per real token": {
        "as trained": ("train", "padding"),
        "random batches": ("train", "padding_by_chance"),
    },
}
_FROM_ZERO = (
    "learning rate",
    "examples per second",
    "tokens per second",
    "model FLOPs utilization (MFU), share of the GPUs' rate",
)
# phase -> (what the page calls it, class of its colour), in the order they are stacked
_PHASES = {
    "data": ("waiting for data", "c1"),
    "forward": ("forward", "c0"),
    "backward": ("backward", "c4"),
    "forward+backward": ("forward and backward", "c0"),
    "overlapped": ("computing while gradients are reduced", "c5"),
    "reduction": ("waiting for gradients", "c3"),
    "optimizer": ("optimizer", "c2"),
    "evaluation": ("evaluation", "c6"),
    "checkpoint": ("checkpoint", "c7"),
    "profile": ("profiling", "cy"),
    "other": ("everything else", "cx"),
}
_COLOURS = dict(_PHASES.values())
# colours of series that occur in several charts
COLOUR_OF = {"train": 0, "validation": 1, "test": 2, "random batches": 4, "rank with least": 4}
# row of the time line -> class of its marks; a phase has the same class in every chart
_MARKS = {
    "resumed": "c0",
    "checkpoints": _PHASES["checkpoint"][1],
    "evaluations": _PHASES["evaluation"][1],
    "rebalanced": "c4",
    "differences": "c3",
    "stops": "c3",
}
_SDC = "silent data corruption (sdc_check)"
_STEP = tuple(name for name in _PHASES if name not in ("evaluation", "checkpoint", "profile"))
MOST_RANKS = 64  # maximum number of ranks drawn: those with the most local work


# -- one run ---------------------------------------------------------------------------------------------------------


def curves(history: History) -> list[str]:
    """Return charts of all curves with points, over the same steps, and one per evaluation metric."""
    best = history.best
    groups = {
        title: {name: history.series(split, key) for name, (split, key) in lines.items()}
        for title, lines in _CURVES.items()
    }
    loss = groups.pop("loss")
    metrics = {
        key.replace("_", " "): {s: history.series(s, key) for s in ("train", "validation")} for key in _metrics(history)
    }
    if groups["learning rate"]["rate"]:
        groups["learning rate"]["as planned"] = history.planned_rates
    drawn = {"loss": loss} | metrics | groups
    charted = []
    for title, lines in drawn.items():
        ring = (
            ("validation", float(best.step)) if best.step is not None and title == best.name.replace("_", " ") else None
        )
        smooth = () if title == "learning rate" else tuple(name for name in lines if name != "validation")
        last = max((x for points in lines.values() for x, _ in points), default=0.0)
        ends = (0.0, max(last, span(history)[1]))  # including planned steps
        look = charts.ChartStyle(linear=title in _FROM_ZERO, span=ends, colours=COLOUR_OF, smooth=smooth, ring=ring)
        charted.append(charts.lines(title, lines, look))
    return [chart for chart in charted if chart]


def span(*histories: History) -> tuple[float, float]:
    """Return the range of steps for charts."""
    return 0.0, float(max((history.steps for history in histories), default=0))


def _metrics(history: History) -> list[str]:
    """Return the validation metrics except the loss."""
    keys = [key for line in history.metrics if line["split"] == "validation" for key in line]
    return [key for key in dict.fromkeys(keys) if key not in ("step", "split", "loss", "examples")]


def time_of_ranks(history: History) -> dict[str, Any] | None:
    """Return bars, a heat map, a table and a sentence on each rank's time per phase; None without times."""
    if not history.timed:
        return None
    sums = history.seconds
    ranks = int(history.timed[-1]["ranks"])
    ranks_shown = _longest_ranks(history, ranks)
    rows = {
        f"rank {rank}": {_PHASES[phase][0]: sums[phase][rank] for phase in _PHASES if phase in sums}
        for rank in ranks_shown
    }
    total = sum(map(sum, sums.values())) / ranks or 1.0
    table = []
    for phase in _PHASES:
        if phase in sums and sum(sums[phase]) > 0.0005 * total * ranks:
            each = sums[phase]
            mean = sum(each) / ranks
            most = max(range(ranks), key=each.__getitem__)
            table.append((*_PHASES[phase], mean, mean / total, min(each), each[most], most))
    steps = sum(line["steps"] for line in history.timed)
    return {
        "bars": charts.bars("seconds of each rank", rows, _COLOURS),
        "heat": _heat(history, ranks_shown),
        "table": table,
        "ranks": ranks,
        "shown": len(ranks_shown),
        "steps": steps,
        "slowest": history.slowest,
        "blind": ranks > 1 and not history.sees_stragglers,
        "clock": history.facts.get("clock", "host"),
        "inside": [_PHASES[p][0] for p in history.facts.get("waits_inside", []) if p in sums and p != "reduction"],
    }


def _longest_ranks(history: History, ranks: int) -> list[int]:
    """Return all ranks, or the `MOST_RANKS` with the most local work, in order."""
    if ranks <= MOST_RANKS:
        return list(range(ranks))
    sums = history.seconds
    work = [sum(each[rank] for phase, each in sums.items() if phase in history.own_phases) for rank in range(ranks)]
    return sorted(sorted(range(ranks), key=lambda rank: -work[rank])[:MOST_RANKS])


def _heat(history: History, ranks_shown: Sequence[int]) -> str:
    """Draw each rank's local work over time, relative to the median rank."""
    lines = [line for line in history.timed if line["steps"]]
    if len(ranks_shown) < 2 or not lines or not history.sees_stragglers:
        return ""
    every = -(-len(lines) // 100)
    columns = []
    for start in range(0, len(lines), every):
        part = [history.own_seconds(line) for line in lines[start : start + every]]
        work = [sum(each) for each in zip(*part, strict=True)]
        usual = median(work) or 1.0
        columns.append([seconds / usual for seconds in work])
    rows = {f"rank {rank}": [column[rank] for column in columns] for rank in ranks_shown}
    ends = (f"step {lines[0]['step']:,}", f"step {lines[-1]['step']:,}")
    return charts.heat(
        "own work relative to the median rank (no colour: equal; full colour: twice)", rows, ends, "times"
    )


def prices(history: History) -> list[tuple[str, str, str]]:
    """Return the costs of padding, communication, checkpoints and evaluation: (name, value, how it is computed)."""
    rows = []
    padding = [y for _, y in history.series("train", "padding")]
    if padding:
        ratio = sum(padding) / len(padding)
        chance = [y for _, y in history.series("train", "padding_by_chance")]
        text = f"{ratio:.2f} tokens are computed per real token"
        if chance:
            text += f"; random batches would have needed {sum(chance) / len(chance):.2f}"
        rows.append(("padding", f"{1 - 1 / ratio:.1%} of the computed tokens", text))
    if not history.timed:
        return rows
    sums, ranks = history.seconds, int(history.timed[-1]["ranks"])
    mean = {phase: sum(each) / ranks for phase, each in sums.items()}
    total = sum(mean.values()) or 1.0
    if ranks > 1 and "reduction" in mean:
        duration = charts.seconds(mean["reduction"])
        why = f"{duration} per rank on average: waiting for gradients (not overlapped) and for slower ranks"
        rows.append(("communication", f"{mean['reduction'] / total:.1%} of the time", why))
    for phase, name, why in (
        ("data", "waiting for data", "time that steps waited for their batch"),
        ("checkpoint", "checkpoints", "time that steps waited for the copy of the state or for the previous save"),
        ("evaluation", "evaluation", "during training and at its end"),
    ):
        if mean.get(phase, 0.0) > 0:
            rows.append((name, f"{mean[phase] / total:.1%} of the time", f"{charts.seconds(mean[phase])}: {why}"))
    return rows


def timeline(history: History) -> str:
    """Draw starts, pauses, checkpoints and evaluations over time."""
    words = {"finish": "finished", "stop": "stopped on request", "failed": "failed", "lost": "no end is recorded"}
    spans = [
        (a.began, a.ended, f"start {i + 1}: step {a.first:,} to {a.last:,}, {words[a.how]}")
        for i, a in enumerate(history.attempts)
    ]
    marks: dict[str, list[tuple[float, str]]] = {}
    for event in history.events:
        step = f"{event.get('step', 0):,}"
        match event["event"]:
            case "start" if event["step"]:
                marks.setdefault("resumed", []).append((event["time"], f"resumed after step {step}"))
            case "checkpoint":
                text = f"checkpoint of step {step}, stall {charts.seconds(event.get('stall_s', 0.0))}"
                marks.setdefault("checkpoints", []).append((event["time"], text))
            case "evaluation":
                marks.setdefault("evaluations", []).append((event["time"], f"evaluation after step {step}"))
            case "hand_over":
                shares = ", ".join(map(str, event.get("micro_batches", [])))
                marks.setdefault("rebalanced", []).append((event["time"], f"after step {step} ranks run {shares}"))
            case "guard":
                marks.setdefault("differences", []).append((event["time"], _differed(event)))
            case "stop" | "failed":
                what = "stopped on request" if event["event"] == "stop" else f"failed: {event.get('error', '')}"
                marks.setdefault("stops", []).append((event["time"], f"{what}, step {step}"))
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(spans[0][0])) if spans else ""
    return charts.timeline("wall-clock time, pauses shortened", spans, marks, _MARKS, begun)


def memory(history: History) -> list[str]:
    """Draw the memory of the ranks with the most and the least memory at each time."""
    if not history.memory:
        return []
    most = [(float(step), max(each) / 2**30) for step, each in history.memory]
    least = [(float(step), min(each) / 2**30) for step, each in history.memory]
    several = len(history.memory[-1][1]) > 1
    series = {"rank with most": most, "rank with least": least} if several else {"rank 0": most}
    gpu = any(key.startswith("gpu_memory_gb") for key in history.system[-1])
    title = "peak GPU memory of a rank's tensors so far, GiB" if gpu else "memory of a process, GiB"
    return [charts.lines(title, series, charts.ChartStyle(linear=True, span=span(history), colours=COLOUR_OF))]


def facts(history: History) -> list[tuple[str, str]]:
    """Return facts about the run: (name, text)."""
    facts = history.facts
    rows = list(facts.get("opening", {}).items())
    if facts:
        hosts: dict[str, list[int]] = {}
        for rank, host in enumerate(facts.get("hosts", [])):
            hosts.setdefault(host, []).append(rank)
        rows.append(("started by", str(facts.get("launch", ""))))
        rows.append(("hosts", "; ".join(f"{host}: {_ranks(ranks)}" for host, ranks in hosts.items())))
        rows.append(("hardware", "; ".join(dict.fromkeys(facts.get("devices", [])))))
        rows.append(("versions", ", ".join(f"{k} {v}" for k, v in facts.get("versions", {}).items())))
        git = facts.get("git")
        rows.append(("git", _git(git) if git else "not in a git repository"))
        rows.append(("starts", _starts(history)))
    return [(name, text) for name, text in rows if text]


def answer(history: History) -> str:
    """Summarize the checks of a finished run in a sentence or two; for any other run say how to continue it."""
    rows = checks(history)
    if history.state != "finished":
        newest = history.newest_checkpoint
        return f"The same command {f'continues from step {newest:,}' if newest else 'starts over'}."
    slowest = history.slowest
    parts = ["All checks passed."] if rows and all(fine is not False for _, fine, _ in rows) else []
    if slowest is not None and slowest.straggles:
        parts.append(f"Rank {slowest.rank} is slower than the others (Where the time went).")
    if missing := [name for name, fine, _ in rows if fine is None]:
        parts.append(f"Not checked: {', '.join(missing)}.")
    return " ".join(parts)


def findings(history: History, live: bool = False) -> list[tuple[str, str]]:
    """Return the problems to show before any number: (title, details). Empty if there are none."""
    rows = []
    failure = history.facts_of("failed") if history.state == "failed" else {}
    if failure:
        message = history.last_error
        if not message.endswith(f"[{failure.get('code')}]"):
            message = f"{failure.get('error', '')} while {failure.get('place', '')}; see {LOG}"
        rows.append((f"The run failed after step {failure.get('step', 0):,}", message))
    elif not history.attempts and history.last_error and not live:
        rows.append(("The run ended before its first step", history.last_error))
    elif history.attempts and history.attempts[-1].how == "lost" and not live:
        rows.append((f"No end is recorded after step {history.steps:,}", "The run was killed or is still training."))
    for event in history.events:
        if event["event"] == "regroup":
            count = int(event.get("processes", 0))
            text = f"{event.get('what', '')}; {count} process{'es continue' if count > 1 else ' continues'}"
            rows.append((f"The ranks changed after step {event.get('step', 0):,}", text))
    stopped = [event for event in _differences(history) if not (event.get("out") or event.get("retried"))]
    for name, fine, text in checks(history):
        if fine is False and not (failure and stopped and name == _SDC):  # the failure entry covers it
            rows.append((name[0].upper() + name[1:], text))
    return rows


def checks(history: History) -> list[tuple[str, bool | None, str]]:
    """Return the checks made during training: (name, passed or None if not made, result)."""
    rows: list[tuple[str, bool | None, str]] = []
    if text := str(history.facts.get("compared") or ""):
        rows.append(("plain reference, before the first step", None if _not_made(text) else True, text))
    if text := str(history.facts_of("finish").get("export") or ""):
        agrees = bool(history.facts_of("finish").get("export_agrees", True))
        rows.append(("export", None if agrees and _not_made(text) else agrees, text))
    events = [_differed(event) for event in _differences(history)]
    every = (history.run.get("sdc_check") or {}).get("every") or 0
    if every or events:
        fine = f"same bits on all ranks, checked every {quantity(every, 'step')}" if every else ""
        rows.append((_SDC, not events, "; ".join(events) or fine))
    unusual = [text for text in _unusual(history) if text]
    rows.append(("loss and gradients", not unusual, "; ".join(unusual) or "finite in every step, no loss spike"))
    return rows if history.metrics else []


def _not_made(text: str) -> bool:
    return text.startswith(("not compared", "the export was not compared"))


def _differences(history: History) -> list[dict[str, Any]]:
    return [event for event in history.events if event["event"] == "guard"]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    together = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]} to {ranks[-1]}" if together else f"ranks {', '.join(map(str, ranks))}"


def _git(git: Mapping[str, Any]) -> str:
    changed = int(git.get("changed", 0))
    state = quantity(changed, "changed file") if changed else "nothing changed"
    branch = f" on {git['branch']}" if git.get("branch") else ""
    return f"{str(git.get('commit', ''))[:12]}{branch}, {state}"


def _unusual(history: History) -> list[str]:
    """Describe loss spikes and skipped updates."""
    events: list[str] = []
    if jumps := [f"{line['step']:,}" for line in history.metrics if line.get("spike")]:
        events.append(f"the loss jumped at step {', '.join(jumps[:10])}{' and more' if len(jumps) > 10 else ''}")
    for name, why in (("skipped_steps", "not finite"), ("overflowed_steps", "fp16 overflow, loss scale too high")):
        if count := sum(int(line.get(name) or 0) for line in history.metrics):
            events.append(f"skipped {quantity(count, 'step')}: {why}")
    return events


def _differed(event: Mapping[str, Any]) -> str:
    """Describe a finding of `sdc_check`."""
    out = ", ".join(map(str, event.get("out", [])))
    then = "the step was recomputed" if event.get("retried") else "stopped"
    if out:
        then = f"{out} computed wrongly and was evicted"
    return f"in step {event.get('step', 0) + 1:,} ranks computed different bits: {then}"


def _starts(history: History) -> str:
    ends = {"finish": "finished", "stop": "stopped on request", "failed": "failed", "lost": "no end recorded"}
    return "; ".join(
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(a.began))} after step {a.first:,}, "
        f"processes: {a.facts.get('processes', '?')}, {ends[a.how]} at step {a.last:,}"
        for a in history.attempts
    )


# -- several runs ----------------------------------------------------------------------------------------------------


def overlaid(histories: Mapping[str, History]) -> list[str]:
    """Return a chart per curve, with one line per run."""
    metrics = dict.fromkeys(key for history in histories.values() for key in _metrics(history))
    chart_lines = {"training loss": ("train", "loss"), "validation loss": ("validation", "loss")}
    chart_lines |= {f"{key.replace('_', ' ')}, validation": ("validation", key) for key in metrics}
    chart_lines |= {title: next(iter(lines.values())) for title, lines in _CURVES.items() if title != "loss"}
    curves = []
    steps = span(*histories.values())
    for title, (split, key) in chart_lines.items():
        series = {name: history.series(split, key) for name, history in histories.items()}
        smooth = tuple(series) if split == "train" and title != "learning rate" else ()
        curves.append(
            charts.lines(title, series, charts.ChartStyle(linear=title in _FROM_ZERO, span=steps, smooth=smooth))
        )
        if key == "loss":
            clocked = {name: _by_clock(history, split) for name, history in histories.items()}
            last = max((points[-1][0] for points in clocked.values() if points), default=0.0)
            ends = (0.0, math.ceil(last * 100) / 100)
            look = charts.ChartStyle("minutes", span=ends, smooth=smooth)
            curves.append(charts.lines(f"{title} against running time", clocked, look))
    return [chart for chart in curves if chart]


def _by_clock(history: History, split: str) -> list[tuple[float, float]]:
    """Return (minutes of running time, loss), without pauses between starts."""
    clock: dict[int, float] = {}
    before = 0.0
    for attempt in history.attempts:
        for line in [*history.ranks, *history.events]:
            if "step" in line and attempt.began <= line["time"] <= attempt.ended:
                clock[line["step"]] = (before + line["time"] - attempt.began) / 60
        before += attempt.ended - attempt.began
    return [(clock[int(step)], loss) for step, loss in history.series(split, "loss") if int(step) in clock]


def time_of_runs(histories: Mapping[str, History]) -> str:
    """Draw a bar per run: seconds per step, mean over ranks, without evaluation and checkpoints."""
    rows = {}
    for name, history in histories.items():
        if history.timed:
            steps = sum(line["steps"] for line in history.timed) or 1
            ranks = int(history.timed[-1]["ranks"])
            sums = history.seconds
            rows[name] = {_PHASES[p][0]: sum(sums[p]) / ranks / steps for p in _STEP if p in sums}
    return charts.bars("seconds per step, mean over ranks", rows, _COLOURS)


_MOST_LABELS = 100  # maximum number of labels drawn: the most frequent ones


def panels(tables: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each split with tables: its name, charts, and scores per label."""
    sections = []
    for split, of_split in tables.items():
        drawn = [_reliability(of_split["reliability"])] if "reliability" in of_split else []
        drawn += _scatters(of_split["scatter"]) if "scatter" in of_split else []
        for plot in of_split.get("plots", ()):
            drawn.append(charts.lines(plot["title"], plot["lines"], charts.ChartStyle(x_name=plot["x"], linear=True)))
        labels = _labels(of_split["labels"]) if "labels" in of_split else None
        if drawn or labels:
            sections.append({"split": split, "charts": drawn, "labels": labels})
    return sections


def _labels(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return bars of each label's F1, best first, and rows (label, precision, recall, F1, average precision, examples),
    with a dash for undefined scores."""
    rows = []
    areas = table.get("average_precision")
    columns = [table[key] for key in ("names", "right", "examples", "given")]
    for name, right, true, predicted, area in zip(*columns, areas or [None] * len(table["names"]), strict=True):
        f1 = 2 * right / (true + predicted) if true + predicted else None
        rows.append((name, right / predicted if predicted else None, right / true if true else None, f1, area, true))
    rows_shown = sorted(rows, key=lambda row: -row[5])[:_MOST_LABELS]
    rows_shown.sort(key=lambda row: -(row[3] or 0.0))
    bars = ""
    for name, _, _, f1, _, _ in rows_shown:
        tip = escape(f"{name}: F1 {_score(f1)}")
        cell = f'<i class="c0" style="width:{100 * (f1 or 0.0):.2f}%" title="{tip}"></i>'
        bars += charts.bar(name, cell, _score(f1))
    title = f"F1 of each {table.get('of', 'label')}" + (
        f", the {len(rows_shown)} most frequent of {len(rows)}" if len(rows_shown) < len(rows) else ""
    )
    return {
        "bars": charts.wide_figure(title, f'<div class="bars">{bars}</div>'),
        "of": table.get("of", "label"),
        "threshold": table.get("threshold"),
        "areas": areas is not None,
        "rows": [(name, *map(_score, scores), true) for name, *scores, true in rows_shown],
    }


def _score(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.3f}"


def _reliability(table: Mapping[str, Any]) -> str:
    """Draw predicted probabilities against observed frequencies, a dot per bin, larger for more examples."""
    every = zip(table["predicted"], table["observed"], table["counts"], strict=True)
    bins = [(x, y, count) for x, y, count in every if count]
    total = sum(count for *_, count in bins)
    error = sum(abs(x - y) * count for x, y, count in bins) / total
    place = charts.Axes(0.0, 1.0, 0.0, 1.0, False)
    body = charts.grid(charts.ticks(0.0, 1.0), place) + _diagonal(place)
    line = " ".join(f"{place.across(x):.1f},{place.up(y):.1f}" for x, y, _ in bins)
    body += f'<polyline class="line faint c0" points="{line}"/>'
    for x, y, count in bins:
        tip = f"{count:,} of {total:,}: predicted {x:.3f}, observed {y:.3f}"
        body += _dot(place, x, y, 2.5 + 5 * (count / total) ** 0.5, tip)
    title = f"calibration of {table['of']}: observed frequency by predicted probability (ECE {error:.3f})"
    return charts.figure(title, body, "predicted probability")


def _scatters(table: Mapping[str, Any]) -> list[str]:
    """Draw true against predicted values, a chart per target."""
    points = []
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
        points.append(charts.figure(f"{name}: predicted against true value{some}", body, "true"))
    return points


def _diagonal(place: charts.Axes) -> str:
    ends: Sequence[float] = (place.left, place.right)
    (x1, y1), (x2, y2) = ((place.across(end), place.up(end)) for end in ends)
    return f'<line class="level" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _dot(place: charts.Axes, x: float, y: float, radius: float, tip: str) -> str:
    at = f'cx="{place.across(x):.1f}" cy="{place.up(y):.1f}" r="{radius:.1f}"'
    return f'<circle class="dot many c0" {at}><title>{escape(tip)}</title></circle>'
