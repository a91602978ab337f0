"""Commands to use before a run: `lockstep plan`, `doctor`, `list`, `schema` and `bench`.

In: the parser, then the parsed command line. Out: an exit status. `plan` refuses everything that `train` refuses, and
starts nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import commands
from lockstep.config import error_messages as messages
from lockstep.config import plugins
from lockstep.config.errors import DONE, FAILED, coded
from lockstep.config.redaction import one_line
from lockstep.config.run import QUICK_START, Run, RunError, load, overrides_of, schema
from lockstep.track import json_output
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import RECORD, Console, error
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from lockstep.data.job import Job
    from lockstep.launchers.launcher import Launcher, LaunchPlan


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    commands.run_file_arguments(parser)
    commands.json_option(parser)
    parser.add_argument("--offline", action="store_true", help="do not fail if the Hub cannot be reached")
    parser.add_argument(
        "--verbose", action="store_true", help="also print the command, its variables, and a submitted job's files"
    )


def run_plan(args: argparse.Namespace) -> int:
    from lockstep.launchers import start

    run = start.continued_as_new_run(commands.run_of(args), Console(True).say)
    launcher = start.launcher_of(run.launch)
    plan = start.plan_of(run, launcher)
    console = Console(True)
    ACTIVITY.set("importing torch")
    with console.busy(lambda: ACTIVITY.name):
        job = start.preview(launcher, plan)
    counts = {r * run.micro_batches // plan.processes for r in range(plan.processes + 1)}
    bounds = sorted(counts)
    shares = sorted({b - a for a, b in itertools.pairwise(bounds)})
    each = f"each with {' or '.join(map(str, shares))} of {run.micro_batches} micro-batches a step"
    staged = not isinstance(job, str) and job.strategy.stages_of(run.strategy, plan.processes) > 1
    if staged or "tensor_parallel" in run.strategy.options:
        each = f"{run.micro_batches} micro-batches a step; some processes work on the same ones"
    here = launcher.starts_all_ranks and launcher.forks_ranks  # the ranks are forks of this command
    whole = args.verbose or RECORD.get() is not None
    started = {
        "launcher": run.launch.name,
        "command": shlex.join(plan.command),
        "variables": " ".join(f"{k}={v}" for k, v in plan.variables.items()) or "none",
    }
    console.facts(
        {
            **({} if here and not whole else started),
            "processes": f"{plan.processes}, {each}",
            "strategy": f"{run.strategy.name}{', exact' if run.strategy.exact else ''}",
            **(amounts(run) if isinstance(job, str) else sizes_of(job)),
            "output": f"{run.folder}{f', copied to {run.remote_dir}' if run.remote_dir else ''}",
            **plan.facts,
        }
    )
    if isinstance(job, str):
        console.say(f"note: not checked on this machine: {job}")
    else:
        run = job.run
        for text in (*job.notes, *remarks(job), *without_effect(job, launcher)):
            console.note(text)
    whole = whole or not plan.facts
    for path, text in sorted(plan.files.items(), key=_is_run_file) if whole else ():
        console.say(f"--- {path}\n{text}", whole=True)
    if not whole:
        names = ", ".join(f"{Path(path).name} ({len(text.splitlines())} lines)" for path, text in plan.files.items())
        folder = Path(next(iter(plan.files))).parent
        console.facts({"files": f"{names}: train writes them to {folder}; --verbose prints them"})
    for note in plan.notes:
        console.say(f"note: {note}")
    room, no_room = disk(job, launcher)
    for note in room:
        console.note(note)
    wrong = [*failures(run, launcher, plan, job, args.offline), *no_room]
    for text in wrong:
        error(coded("LS8082", f"this would fail: {text}"))
    return FAILED if wrong else DONE


def _is_run_file(file: tuple[str, str]) -> bool:
    """Return whether a submitted file is the run file, which is printed last: it is long, and others call it."""
    return Path(file[0]).name == "run.yaml"


def failures(run: Run, launcher: Launcher, plan: LaunchPlan, job: Job | str, offline: bool) -> list[str]:
    """List problems that would fail the start but are not mistakes in the run file."""
    from lockstep.launchers import start

    if isinstance(job, str):
        if offline or start.checked_by_ranks_only(launcher):
            return []
        return [f"{job}. --offline plans without the Hub"]
    from lockstep.training import model_stats

    there = launcher.memory(plan)
    short = None if there is None else model_stats.shortage(job, there)
    return [short] if short is not None else []


def disk(job: Job | str, launcher: Launcher) -> tuple[list[str], list[str]]:
    """Return notes on the disk of OUTPUT, and the reasons why the run would be refused for it."""
    if isinstance(job, str) or launcher.submits:
        return [], []
    from lockstep.training import disk_forecast

    try:
        return disk_forecast.check(job), []
    except RunError as error:
        return [], [error.message]


def without_effect(job: Job, launcher: Launcher) -> list[str]:
    """Notes on keys that have no effect with the run's other keys and its number of processes."""
    from lockstep.distributed.hardware import gpus_of
    from lockstep.training import model_stats, startup

    on_cpu = job.run.launch.device == "cpu" or not (launcher.submits or gpus_of(job.run.launch))
    return startup.without_effect(job, model_stats.steps_of(job), job.processes, on_cpu)


def amounts(run: Run) -> dict[str, str]:
    """Facts that follow from the run file alone."""
    return {
        "model": run.model.source or f"{run.model.type} from scratch",
        "data": ", ".join(each.name for each in run.data.sources or ()) or str(run.data.source or run.data.train),
        "length": quantity(run.steps, "step") if run.steps else quantity(f"{run.epochs:g}", "epoch"),
    }


def remarks(job: Job) -> list[str]:
    """Notes on the run's data, and on the entries of its model's config."""
    from lockstep.training import startup

    return startup.remarks(job)


def sizes_of(job: Job) -> dict[str, str]:
    """Facts about the prepared job: strategy with resolved options, data and model."""
    from lockstep.training import model_stats

    return {"strategy": job.summary()} | model_stats.facts(job)


PAGE = "lockstep-selftest.html"


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", default=".", help="folder whose write speed is measured, as for checkpoints (default: .)"
    )
    parser.add_argument(
        "--processes", type=int, help="start this many processes on this machine, and measure the links between them"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of the processes")
    parser.add_argument(
        "--selftest", action="store_true", help="run every strategy on this machine, and compare with one process"
    )
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="strategies for --selftest (default: all)")
    parser.add_argument("--page", help=f"page written by --selftest (default: {PAGE})")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--into", help=argparse.SUPPRESS)  # for the processes that --processes starts


def run_doctor(args: argparse.Namespace) -> int:

    if args.processes is not None and args.processes < 1:
        raise RunError("LS8083", f"--processes: invalid value {args.processes}; expected an integer >= 1")
    if args.selftest:
        from lockstep.lab.doctor import selftest

        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise RunError("LS8084", "--selftest: starts its own processes; run it without torchrun")
        names = args.strategies or plugins.names("strategies")
        return selftest(names, args.processes, args.device, Path(args.page or PAGE), args.json)
    for option in ("page", "strategies"):
        if getattr(args, option):
            raise RunError("LS8085", f"--{option}: has an effect only with --selftest; add --selftest")
    from lockstep.lab.doctor import doctor, into

    if args.into is not None:
        return into(Path(args.into), Path(args.folder), args.device)
    return doctor(Path(args.folder), args.processes, args.json, args.device)


# kind of plug-in -> key of the run file
_KEYS = {"tasks": "task.name", "strategies": "strategy.name", "optimizers": "optim.name"}
_KEYS |= {"launchers": "launch.name", "track": "track.to"}


def list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run_list(args: argparse.Namespace) -> int:
    kinds = {kind: listed(kind) for kind in _KEYS}
    if args.json:
        tables = {"trackers" if kind == "track" else kind: rows for kind, rows in kinds.items()}
        return json_output.emit("list", DONE, tables=tables)
    console = Console(True)
    for kind, key in _KEYS.items():
        title = f"{kind if kind != 'track' else 'trackers'} ({key})"
        console.columns(title, [cells(row) for row in kinds[kind]], cut=True)
    return 0


# kind of plug-in -> (attributes with its required packages, extra that installs them)
_NEEDS = {"strategies": ("exact", "needs"), "optimizers": ("packages", "extra"), "track": ("packages",)}


def listed(kind: str) -> list[dict[str, Any]]:
    """Describe the plug-ins of a kind, one object each: name and summary; for strategies also `results`, the guarantee
    relative to one process; for strategies, trackers and optimizers whether their requirements are installed, or the
    command that installs them. Plug-ins are parsed, not imported, which would import torch and transformers."""
    rows, ours = [], plugins.built_in(kind)
    for name in plugins.names(kind):
        row: dict[str, Any] = {"name": name}
        try:
            summary, attributes = plugins.described(kind, name, *_NEEDS.get(kind, ()))
        except plugins.PluginError as broken:
            rows.append(row | {"summary": f"cannot be loaded: {one_line(broken, 200)}"})
            continue
        if kind == "strategies":
            row["results"] = "same bits" if attributes["exact"] else "rounding"
        if kind in _NEEDS:
            missing = plugins.lacking(attributes.get("needs") or attributes.get("packages") or ())
            extra = attributes.get("extra") or (name if kind == "track" else "")
            how = plugins.install(missing[0], extra) if missing and name in ours else f"pip install {' '.join(missing)}"
            row |= {"ready": not missing, "install": how if missing else None}
        rows.append(row | {"summary": summary} | ({} if name in ours else {"distribution": plugins.origin(kind, name)}))
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """Format a row of `lockstep list` for a terminal."""
    ready = [{True: "ready", False: "lacking"}[row["ready"]]] if "ready" in row else []
    summary = f"{row['install']}; {row['summary']}" if row.get("install") else row["summary"]
    summary += f" ({row['distribution']})" if "distribution" in row else ""
    return [row["name"], *([row["results"]] if "results" in row else []), *ready, summary]


def schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run_schema(args: argparse.Namespace) -> int:
    print(json.dumps(schema(), indent=2))
    return 0


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    commands.run_file_arguments(parser)
    parser.add_argument(
        "--processes", type=int, nargs="+", metavar="N", help="default: 1, 2, 4, ... to the number of cores or GPUs"
    )
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="default: the run file's")
    parser.add_argument("--micro-batches", type=int, nargs="+", metavar="N", help="default: the run file's")
    parser.add_argument(
        "--over", action="append", default=[], metavar="key=value,value", help="vary any other key of the run file"
    )
    parser.add_argument(
        "--options",
        action="store_true",
        help="try options for speed and memory one at a time, then the helpful ones together; write the best run file",
    )
    parser.add_argument("--weak", action="store_true", help="batch_size and micro_batches grow with the processes")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per job (default 10)")
    parser.add_argument("--skip", type=int, default=3, help="untimed steps before them (default 3)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved runs of each job (default 3)")
    parser.add_argument("--out", help="folder of the results; default: OUTPUT-bench")
    commands.json_option(parser)


def run_bench(args: argparse.Namespace) -> int:
    from lockstep.lab.bench import Bench, bench
    from lockstep.lab.bench_options import options_of
    from lockstep.lab.sweep import sweep_file

    path, overrides, base = measured_run(args)
    over = {}
    if args.strategies:
        over["strategy.name"] = args.strategies
    if args.micro_batches:
        over["micro_batches"] = args.micro_batches
    over |= sweep_file.parse(args.over)
    processes = args.processes or upwards(base)
    if args.options:
        over = options_of(base) | over
        processes = args.processes or processes[-1:]
        if len(processes) > 1 or args.weak:
            raise RunError("LS8031", "--options compares options on one number of processes; give one, without --weak")
    if min(processes) < 1:
        raise RunError("LS8088", f"--processes: invalid value {min(processes)}; expected an integer >= 1")
    folder = Path(args.out or f"{base.folder}-bench")
    request = Bench(
        base, over, sorted(set(processes)), args.steps, args.skip, args.rounds, args.weak, folder, args.options
    )
    return bench(request, path, overrides, QUICK_START)


def measured_run(args: argparse.Namespace) -> tuple[str | None, messages.Overrides, Run]:
    """Return the run file, the overrides and the run to measure. Errors: `RunError`, also for invalid numbers of steps
    and rounds."""
    path, words = commands.file_and_overrides(args)
    overrides = overrides_of(words)
    base = load(path, overrides, QUICK_START)
    for name in ("steps", "rounds"):
        if getattr(args, name) < 1:
            raise RunError("LS8086", f"--{name}: invalid value {getattr(args, name)}; expected a number > 0")
    if args.skip < 0:
        raise RunError("LS8087", f"--skip: invalid value {args.skip}; expected an integer >= 0 (steps)")
    return path, overrides, base


def upwards(run: Run) -> list[int]:
    """Return 1, 2, 4, ... up to the processes of `launch.processes: auto`."""
    from lockstep.launchers.local import processes_of

    most = processes_of(run.with_keys("launch", processes="auto"))
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]
