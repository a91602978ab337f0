"""Commands for a finished run: `lockstep evaluate`, `push` and `sweep`.

In: the parser, then the parsed command line. Out: an exit status.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from lockstep import commands
from lockstep.config.run import QUICK_START, RunError
from lockstep.lab.sweep.sweep_file import read
from lockstep.track.console import Console, error


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT[/checkpoints/step-N]")
    parser.add_argument("--split", help="train, validation or test; default: the last two, or those of FILE")
    parser.add_argument(
        "words", nargs="*", metavar="FILE | key=value", help="score FILE (data.test=FILE); for example task.beams=4"
    )
    commands.json_option(parser)


def run_evaluate(args: argparse.Namespace) -> int:
    from lockstep.training.evaluate_export import evaluate

    files = [word for word in args.words if Path(word).is_file()]
    overrides = [word for word in args.words if word not in files]
    return evaluate(Path(args.output), args.split, [*overrides, *([f"data.test={json.dumps(files)}"] if files else [])])


def push_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT")
    parser.add_argument("repository", metavar="USER/REPO")
    parser.add_argument("--public", action="store_true", help="create a public repository (default: private)")
    parser.add_argument("--replace", action="store_true", help="replace a model of another family or size")


def run_push(args: argparse.Namespace) -> int:
    from lockstep.checkpoint.hub_push import PushFailed, push

    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", args.repository):
        raise RunError(
            "LS8070",
            f"{args.repository!r} is not a repository of the Hub: expected USER/REPO. For a folder, copy OUTPUT/export",
        )
    say = Console(True).say
    try:
        pushed = push(Path(args.output), args.repository, not args.public, say, replace=args.replace)
    except PushFailed as failed:
        error(str(failed))
        return 1
    say(str(pushed))
    return 0


def sweep_arguments(parser: argparse.ArgumentParser) -> None:
    commands.run_file_arguments(parser)
    parser.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="key=value,value",
        help="try these values; with --search also key=low..high, or key=low..high:log",
    )
    parser.add_argument(
        "--metric", help="metric that sorts the table: accuracy, or -loss (lower is better; the default)"
    )
    parser.add_argument("--split", help="split of the metric (default validation)")
    parser.add_argument("--parallel", type=int, metavar="N", help="trials at once (default 1)")
    parser.add_argument(
        "--no-share", dest="share", action="store_false", default=None, help="recompute shared steps in every trial"
    )
    parser.add_argument("--search", type=int, metavar="TRIALS", help="let optuna choose this many trials")
    parser.add_argument("--out", help="folder of the trials; default: OUTPUT-sweep")
    commands.json_option(parser)
    parser.add_argument("--prepare", action="store_true", help="write every trial's run file and start none")


def run_sweep(args: argparse.Namespace) -> int:
    from lockstep.lab.sweep.sweep import prepare_trials, sweep

    path, words = commands.file_and_overrides(args)
    names = ("over", "metric", "split", "parallel", "share", "search", "out")
    request = read(path, QUICK_START, words, {name: getattr(args, name) for name in names})
    return prepare_trials(request) if args.prepare else sweep(request)
