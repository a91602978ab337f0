"""`lockstep bench`: throughput and memory of the user's own job over processes, strategies and micro-batches.

In: a run file and what to vary. Out: a table, and a folder with `bench.json`, `bench.html` and the folders of the
single jobs. Every job runs in processes of its own, through the run's launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.errors import STOPPED
from lockstep.config.run import Run, RunError, keep, load, replace_text
from lockstep.launchers import start
from lockstep.tools.bench.bench_results import Bench, BenchRow, reasons, table, write
from lockstep.tools.subprocess_job import Child
from lockstep.tools.sweep import sweep_file
from lockstep.track.console import Console
from lockstep.training import timing
from lockstep.training.resolve import Job

MEASURE = "lockstep.training.timing.measure"  # the job that every rank does
FILE = "job.json"  # what the process that measures is sent


def bench(request: Bench, path: str | None, overrides: Mapping[str, Any], defaults: Mapping[str, Any]) -> int:
    """Measure, and write down after every job. Returns 0, or 1 when no job could be measured. Errors: `RunError`
    before anything starts, for values that make no run file or when nothing at all can run."""
    if start.joining():
        raise RunError("LS8020", "bench starts the processes of each job itself; run it outside of torchrun and srun")
    console = Console(True)
    rows = rows_of(request, path, overrides, defaults)
    runnable = [row for row in rows if row.reason is None]
    if not runnable:
        raise RunError("LS8021", f"none of the {len(rows)} jobs can run; the first fails with: {rows[0].reason}")
    count = len(runnable) * request.rounds
    each = f"{request.skip} + {request.steps} steps"
    console.say(f"{len(runnable)} configuration(s), {request.rounds} round(s) of {each} each -> {request.folder}")
    done = 0
    for number in range(request.rounds):  # interleaved: a slow minute of the machine meets all of them
        for place, row in enumerate(rows):
            if row.reason is not None:
                continue
            done += 1
            one(request, row, number, request.folder / "jobs" / f"{place + 1:03d}")
            what = row.reason or f"{row.rates[-1]:.1f} examples/s"
            name = f"{row.processes} process(es), {row.series}"
            console.say(f"[{done} of {count}] round {number + 1}: {name}: {what}")
            write(request, rows)
    console.table(f"{request.base.name}: median of {request.rounds} round(s)", *table(rows), key="jobs")
    for text in reasons(rows):
        console.say(f"cannot run: {text}")
    console.say(f"results    {request.folder}/bench.html, {request.folder}/bench.json")
    return 0 if any(row.rounds for row in rows) else 1


def rows_of(
    request: Bench, path: str | None, overrides: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[BenchRow]:
    """Every combination, with the reason of those that cannot run, as far as it can be said before they start. Errors:
    `RunError` for a value that by itself makes no run file."""
    for key, values in request.over.items():
        for value in values:
            load(path, {**overrides, key: value}, defaults)
    rows = []
    for keys in sweep_file.product(request.over):
        for count in request.processes:
            mine: sweep_file.Overrides = {**keys, "launch.processes": count}
            if request.weak:
                batch = keys.get("batch_size", request.base.batch_size)
                micro_batches = keys.get("micro_batches", request.base.micro_batches)
                mine |= {"batch_size": batch * count, "micro_batches": micro_batches * count}
            row = BenchRow(count, series(request, keys), mine)
            rows.append(row)
            try:
                row.run = load(path, {**overrides, **mine}, defaults)
                row.job = resolved(row.run)
            except RunError as caught:
                row.reason = " ".join(str(caught).split())
    return rows


def series(request: Bench, keys: sweep_file.Overrides) -> str:
    """What a line in the plots is called: the strategy, and whatever else is varied."""
    names = [str(keys.get("strategy.name", request.base.strategy.name))]
    for key, value in keys.items():
        if key == "micro_batches":
            names.append(f"{value} micro-batches{' a process' if request.weak else ''}")
        elif key != "strategy.name":
            names.append(f"{key}={sweep_file.format_value(value)}")
    return ", ".join(names)


def resolved(run: Run) -> Job:
    """The job, its data prepared. Errors: `RunError`."""
    launcher = start.launcher_of(run)
    elsewhere = launcher.joins and str(getattr(launcher.options(run), "machines", "?")) != "1"
    if launcher.submits or elsewhere:
        raise RunError(
            "LS8022",
            f"launch.name: bench cannot start the processes of {run.launch.name} on other machines; run it "
            "inside the job, with a launcher for one machine",
        )
    return start.resolved(run)[2]


def one(request: Bench, row: BenchRow, number: int, folder: Path) -> None:
    """One job of one round, in processes of its own; what it found, or why it failed, goes into the row."""
    assert row.job is not None
    mine = row.job.into(str(folder))
    keep(mine.run)
    (folder / timing.FILE).unlink(missing_ok=True)
    replace_text(folder / FILE, mine.dump())
    words = [str(folder / FILE), str(request.steps), str(request.skip)]
    child = Child("lockstep.tools.bench.bench.job", words, folder, "job")
    try:
        child.wait()
    except BaseException:  # Ctrl-C: what was found is written down already
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
    """In the child: start the ranks through the run's launcher. Returns their exit status."""
    path, steps, skip = words
    mine = Job.load(Path(path).read_text(encoding="utf-8"))
    return start.start_ranks(start.launcher_of(mine.run), mine, (MEASURE, steps, skip))
