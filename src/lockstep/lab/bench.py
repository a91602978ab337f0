"""`lockstep bench`: compare a job's throughput and memory across numbers of processes, strategies and micro-batches.

In: a run file and the keys to vary. Out: a table of medians and scaling efficiency, and a folder with `bench.json`,
`bench.html` with its plots, and a folder per job. Each job runs in its own processes, through the run's launcher.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config.errors import STOPPED
from lockstep.config.output_files import replace_text
from lockstep.config.run import Run, RunError, load, write_run_yaml
from lockstep.data.job import Job
from lockstep.distributed.hardware import processor
from lockstep.lab import bench_options
from lockstep.lab.bench_row import BenchRow
from lockstep.lab.subprocess_job import Child
from lockstep.lab.sweep import sweep_file
from lockstep.launchers import start
from lockstep.track.console import Console, clock
from lockstep.track.report import charts
from lockstep.track.report.report import write_page
from lockstep.training import timing
from lockstep_trace.coded import quantity

MEASURE = "lockstep.training.timing.measure"  # the job that every rank runs
FILE = "job.json"  # sent to the measuring process


@dataclass(frozen=True)
class Bench:
    """The request: what to vary, and how to measure."""

    base: Run
    over: Mapping[str, Sequence[Any]]  # keys to vary besides the processes
    processes: Sequence[int]  # values of `launch.processes`: processes per machine
    steps: int
    skip: int
    rounds: int
    weak: bool  # batch_size and micro_batches grow with the processes
    folder: Path
    singly: bool = False  # `--options`: vary one key at a time, and also measure the unchanged run file


def bench(request: Bench, path: str | None, overrides: Mapping[str, Any], defaults: Mapping[str, Any]) -> int:
    """Run all jobs and write the results after each one. Returns 0, or 1 if no job could be measured. Errors:
    `RunError` before anything starts, if a value is invalid or no job can run."""
    if start.joining():
        raise RunError("LS8020", "bench starts the processes of each job itself; run it outside of torchrun and srun")
    console = Console(True)
    rows = rows_of(request, path, overrides, defaults)
    runnable = [row for row in rows if row.reason is None]
    if not runnable:
        raise RunError("LS8021", f"none of the {len(rows)} jobs can run; the first fails with: {rows[0].reason}")
    each = f"{request.skip} warm-up and {request.steps} timed steps"
    console.say(
        f"{quantity(len(runnable), 'configuration')}, {quantity(request.rounds, 'round')} of {each} -> {request.folder}"
    )
    try:
        (request.folder / "jobs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(request.folder, error) from error
    measure(request, rows, rows, range(request.rounds), console)
    if request.singly and len(keys := bench_options.faster(rows)) > 1:
        together = row_of(request, keys, request.processes[0], path, overrides, defaults)
        rows.append(together)
        console.say(f"together: {bench_options.words(keys)}")
        measure(request, rows, [*rows[:2], together], range(request.rounds, 2 * request.rounds), console)
    title = f"{request.base.name}: median of {quantity(request.rounds, 'round')}"
    console.table(title, *(bench_options.table if request.singly else table)(rows), key="jobs")
    for text in reasons(rows):
        console.say(f"cannot run: {text}")
    if request.singly:
        for text in bench_options.advice(rows, request.base):
            console.say(f"slower     {text}")
        console.say(f"best       {best(request, rows, path, overrides, defaults)}")
    console.say(f"results    {request.folder}/bench.html, {request.folder}/bench.json")
    return 0 if any(row.rounds for row in rows) else 1


def measure(
    request: Bench, rows: Sequence[BenchRow], mine: Sequence[BenchRow], rounds: Sequence[int], console: Console
) -> None:
    """Run each row in `mine`, a subset of `rows`, once per round; write the results after every run."""
    count = sum(row.reason is None for row in mine) * len(rounds)
    done = 0
    for number in rounds:  # interleaved, so that a slow minute of the machine affects all jobs
        for row in mine:
            if row.reason is not None:
                continue
            done += 1
            one(request, row, number, request.folder / "jobs" / f"{rows.index(row) + 1:03d}")
            what = row.reason or f"{row.rates[-1]:.1f} examples/s"
            name = f"{quantity(row.processes, 'process')}, {row.series}"
            console.say(f"[{done} of {count}] round {number + 1}: {name}: {what}")
            write(request, rows)


def best(
    request: Bench,
    rows: Sequence[BenchRow],
    path: str | None,
    overrides: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> str:
    """Write the run file with the options that made the job fastest as FOLDER/best.yaml; returns the sentence about
    it."""
    if not rows[0].rounds:
        return "unknown: the unchanged run file could not be measured"
    file = request.folder / "best.yaml"
    if not (gained := bench_options.gains(rows)):
        file.unlink(missing_ok=True)
        return "the unchanged run file: no option was faster in every round by more than the noise of the measurement"
    row = gained[0]
    keys, speeds = bench_options.varied(row), bench_options.ratios(row, rows[0])
    replace_text(file, load(path, {**overrides, **keys}, defaults).dump())
    return (
        f"{file}: {bench_options.words(keys)}; {statistics.median(speeds):.2f} times the speed ({min(speeds):.2f} to "
        f"{max(speeds):.2f}), weights: {bench_options.same_weights(row, rows[0])}"
    )


def rows_of(
    request: Bench, path: str | None, overrides: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[BenchRow]:
    """Return one row per combination; combinations known not to run have a reason. Errors: `RunError` for a value that
    is invalid whatever the other keys are."""
    for key, values in request.over.items():
        for value in values:
            load(path, {**overrides, key: value}, defaults)
    combinations: Sequence[sweep_file.Overrides] = [*sweep_file.product(request.over)]
    if request.singly:
        singles = ({key: value} for key, values in request.over.items() for value in values)
        combinations = [{}, {}, *singles, *bench_options.pairs_of(request.base)]
    rows = [
        row_of(request, keys, count, path, overrides, defaults) for keys in combinations for count in request.processes
    ]
    if request.singly:  # such as `model.compile: false` if `auto` resolves to false
        known = rows[0].job and rows[0].job.run
        rows[2:] = [row for row in rows[2:] if row.job is None or row.job.run != known]
    return rows


def row_of(
    request: Bench,
    keys: sweep_file.Overrides,
    count: int,
    path: str | None,
    overrides: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> BenchRow:
    """Return one combination on `count` processes, with a reason if it is known not to run."""
    mine: sweep_file.Overrides = {**keys, "launch.processes": count}
    if request.weak:
        batch = keys.get("batch_size", request.base.batch_size)
        micro_batches = keys.get("micro_batches", request.base.micro_batches)
        mine |= {"batch_size": batch * count, "micro_batches": micro_batches * count}
    row = BenchRow(count, series(request, keys), mine)
    try:
        row.run = load(path, {**overrides, **mine}, defaults)
        row.job = resolved(row.run)
    except RunError as caught:
        row.reason = " ".join(str(caught).split())
    return row


def series(request: Bench, keys: sweep_file.Overrides) -> str:
    """Name of a line in the plots: the strategy and the other varied keys; with `--options`, only the keys."""
    if request.singly:
        return bench_options.words(keys) or "run file"
    names = [str(keys.get("strategy.name", request.base.strategy.name))]
    for key, value in keys.items():
        if key == "micro_batches":
            names.append(f"{value} micro-batches{' a process' if request.weak else ''}")
        elif key != "strategy.name":
            names.append(f"{key}={sweep_file.format_value(value)}")
    return ", ".join(names)


def resolved(run: Run) -> Job:
    """Resolve the job and prepare its data. Errors: `RunError`."""
    launcher = start.launcher_of(run.launch)
    elsewhere = launcher.joins and str(getattr(launcher.options(run.launch), "machines", "?")) != "1"
    if launcher.submits or elsewhere:
        raise RunError(
            "LS8022",
            f"launch.name: bench cannot start the processes of {run.launch.name} on other machines; run it "
            "inside the job, with a launcher for one machine",
        )
    return start.resolved(run)[1]


def one(request: Bench, row: BenchRow, number: int, folder: Path) -> None:
    """Run one job of one round in its own processes. The row gets its timing, or the reason why it failed."""
    assert row.job is not None
    mine = row.job.into(folder)
    write_run_yaml(mine.run)
    (folder / timing.FILE).unlink(missing_ok=True)
    replace_text(folder / FILE, mine.dump())
    words = [str(folder / FILE), str(request.steps), str(request.skip)]
    child = Child("lockstep.lab.bench.job", words, folder, "job")
    try:
        child.wait()
    except BaseException:  # Ctrl-C: earlier results are already written
        child.kill()
        raise
    measured = timing.read(folder)
    if child.status == 0 and measured is not None:
        row.rounds[number] = measured
    elif child.status == STOPPED:
        row.reason = "was stopped"
    else:
        row.reason = child.reason()


def job(words: list[str]) -> int:
    """Child process: start the ranks through the run's launcher. Returns their exit status."""
    path, steps, skip = words
    mine = Job.load(Path(path).read_text(encoding="utf-8"))
    return start.start_ranks(start.launcher_of(mine.run.launch), mine, (MEASURE, steps, skip))


# -- results ----------------------------------------------------------------------------------------------------------


def efficiency(row: BenchRow, rows: Sequence[BenchRow]) -> float | None:
    """Examples per second and process, relative to the fewest processes of the same series: the median of the ratios
    within a round."""
    same = [r for r in rows if r.series == row.series and r.rounds]
    if not row.rounds or not same:
        return None
    base = min(same, key=lambda r: r.count)
    ratios = []
    for number, t in row.rounds.items():
        if (b := base.rounds.get(number)) is not None:
            each, of_base = t.examples / t.seconds / t.processes, b.examples / b.seconds / b.processes
            ratios.append(each / of_base)
    return statistics.median(ratios) if ratios else None


def table(rows: Sequence[BenchRow]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of the terminal's table, one line per measured row."""
    columns = ["", "processes", "examples/s", "efficiency", "s/step", "whole run", "peak MiB"]
    cells = []
    for row in rows:
        if not row.rounds:
            continue
        middle, share = row.middle(), efficiency(row, rows)
        cells.append(
            [
                row.series,
                str(row.count),
                f"{middle['examples_per_s']:.1f}",
                "-" if share is None else f"{share:.0%}",
                f"{middle['seconds_per_step']:.3f}",
                clock(middle["whole_run_s"]),
                f"{max(middle['peak_device'], middle['peak_resident']) / 2**20:.0f}",
            ]
        )
    return columns, cells


def reasons(rows: Sequence[BenchRow]) -> list[str]:
    """One line per row that could not run, or failed while running."""
    return [
        f"{row.series}, {quantity(row.processes, 'process')}: {row.reason}" for row in rows if row.reason is not None
    ]


def details(rows: Sequence[BenchRow]) -> tuple[list[str], list[list[str]]]:
    """The remaining numbers, for the page."""
    sizes = {"host MiB": "peak_resident", "GPU MiB": "peak_device"}
    sizes |= {"tensors at rest, MiB": "at_rest", "tensors at the update, MiB": "at_update"}
    measured = [row for row in rows if row.rounds]
    if not any(row.middle()["peak_device"] for row in measured):
        del sizes["GPU MiB"]
    columns = ["", "processes", "lowest to highest", "tokens/s", "padding", "threads", *sizes]
    cells = []
    for row in measured:
        middle = row.middle()
        spread = f"{middle['examples_per_s_lowest']:.1f} to {middle['examples_per_s_highest']:.1f}"
        numbers = [spread, f"{middle['tokens_per_s']:,.0f}", f"{middle['padding']:.2f}", f"{middle['threads']:.0f}"]
        numbers += [f"{middle[name] / 2**20:,.1f}" for name in sizes.values()]
        cells.append([row.series, str(row.count), *numbers])
    return columns, cells


def write(request: Bench, rows: Sequence[BenchRow]) -> None:
    """Write `bench.json` and the page with its plots. Errors: `RunError` if the folder cannot be written."""
    values = {
        "format": 1,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "asked": {
            "processes": list(request.processes),
            "over": {key: list(tried) for key, tried in request.over.items()},
            "steps": request.steps,
            "skip": request.skip,
            "rounds": request.rounds,
            "weak": request.weak,
            "singly": request.singly,
        },
        "run": request.base.model_dump(mode="json"),
        "rows": [
            {
                "series": row.series,
                "processes": row.count,
                "keys": row.keys,
                "reason": row.reason,
                "efficiency": efficiency(row, rows),
                "median": row.middle() if row.rounds else None,
                "rounds": [asdict(t) for t in row.rounds.values()],
            }
            for row in rows
        ],
    }
    numbers = (bench_options.table if request.singly else table)(rows)
    tables = {"numbers": numbers, "details": details(rows), "reasons": reasons(rows)}
    page = {"values": values, **tables, "plots": plots(rows), "yaml": request.base.dump()}
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        replace_text(request.folder / "bench.json", json.dumps(values, indent=1))
        write_page(request.folder / "bench.html", "bench.html.jinja", title=f"{request.base.name}: bench", **page)
    except OSError as error:
        raise _not_written(request.folder, error) from error


def _not_written(folder: Path, error: OSError) -> RunError:
    return RunError("LS8030", f"--out: cannot write to {folder}: {error.strerror}; give another --out")


def plots(rows: Sequence[BenchRow]) -> list[str]:
    """Charts against the number of processes, one line per series."""
    first = rows[0].series

    def against(title: str, value: Callable[[BenchRow], float | None], ideal: bool = False) -> str:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.rounds and (height := value(row)) is not None:
                lines.setdefault(row.series, []).append((row.count, height))
        for points in lines.values():
            points.sort()
        if ideal and len(lines.get(first, [])) > 1:
            (count, rate), (most, _) = lines[first][0], lines[first][-1]
            lines[f"{first}, linear scaling"] = [(count, rate), (most, rate * most / count)]
        return charts.lines(title, lines, charts.ChartStyle("processes"))

    drawn = [
        against("examples per second", lambda row: row.middle()["examples_per_s"], ideal=True),
        against("time of the whole run, in minutes", lambda row: row.middle()["whole_run_s"] / 60),
        against("scaling efficiency, per cent", lambda row: 100 * (efficiency(row, rows) or 0)),
        against("peak memory of a rank, MiB", lambda row: row.middle()["peak_resident"] / 2**20),
        against("peak memory of a rank on its GPU, MiB", lambda row: row.middle()["peak_device"] / 2**20 or None),
        against("tensors of a rank at the update, MiB", lambda row: row.middle()["at_update"] / 2**20),
    ]
    return [chart for chart in drawn if chart]


def machine() -> dict[str, Any]:
    """Describe the machine and the software on which the numbers were measured."""
    return {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform(terse=True)}
