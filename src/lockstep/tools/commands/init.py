"""`lockstep init`: a commented run file for your own data."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.config.run import RunError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml", help="the file to write (default: run.yaml), key=value")
    parser.add_argument(
        "--data",
        action="append",
        help="a folder, a file, a Hub id, or builtin/emotion; given several times: a mixture of them",
    )
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="FILE",
        help="move another system's in: a Python script, a command line (.sh), training_args.json, YAML of axolotl, "
        "LLaMA-Factory, TRL or accelerate config, DeepSpeed JSON; no code is run",
    )
    parser.add_argument(
        "--partial", action="store_true", help="with --from: write the file also where it would train something else"
    )
    parser.add_argument("--task", help="default: guessed from the columns")
    parser.add_argument("--model", help="Hub id or folder of a pretrained model, or scratch")
    parser.add_argument("--yes", action="store_true", help="ask nothing: take what is guessed")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def main(known: argparse.Namespace) -> int:
    from lockstep.tools.import_config import import_config
    from lockstep.tools.init import init, prompts

    paths = [word for word in known.words if "=" not in word]
    if len(paths) > 1:
        raise RunError(f"one run file is written at a time, not {' and '.join(paths)}")
    first, *more = known.data or [None]
    flags = {"data": first, "task": known.task, "model": known.model}
    ask = None if known.yes or not prompts.can_ask() else prompts.terminal
    path = Path(paths[0] if paths else "run.yaml")
    overrides = [word for word in known.words if "=" in word]
    if known.origin is not None:
        if more:
            raise RunError("--from: give --data once; several sources are written by hand: data.sources")
        return import_config.move(path, Path(known.origin), flags, overrides, known.force, ask, known.partial)
    if known.partial:
        raise RunError("--partial: it goes with --from")
    return init.init(path, flags, overrides, known.force, ask, more)
