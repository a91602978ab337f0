"""Commands to begin with: `lockstep train`, `predict`, `verify`, `trace` and `init`.

In: the parser, then the parsed command line. Out: an exit status.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import commands
from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.distributed.signals import say_what_ended
from lockstep.launchers import start

if TYPE_CHECKING:
    from lockstep.track import json_output
else:
    (json_output,) = lazy("lockstep.track", "json_output")


def train_arguments(parser: argparse.ArgumentParser) -> None:
    commands.run_file_arguments(parser)
    voice = parser.add_mutually_exclusive_group()
    voice.add_argument("--quiet", action="store_true", help="print only notes and errors (track.console=quiet)")
    voice.add_argument("--verbose", action="store_true", help="print every line of the log (track.console=verbose)")
    parser.add_argument("--detach", action="store_true", help="return once the job is submitted (launch.detach)")
    commands.json_option(parser)


def run_train(args: argparse.Namespace) -> int:
    args.overrides += [f"track.console={voice}" for voice in ("quiet", "verbose") if getattr(args, voice)]
    args.overrides += ["launch.detach=true"] if args.detach else []
    say_what_ended()
    if args.answer_json and start.joining():
        raise RunError(
            "LS8112",
            "--json: under this launcher every rank would print an object; remove it, and read OUTPUT/scores.json",
        )
    run = commands.run_of(args)
    if not args.answer_json:
        return start.train(run)
    logged = json_output.log_end(run.folder)
    return json_output.of_training(start.train(run), run.folder, logged)


def predict_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT[/checkpoints/step-N]")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="TEXT|FILE",
        help="a text, or a file of texts: .jsonl, .json, .csv, .tsv and .parquet with the run's columns, .txt with one "
        "text per line; default: lines of standard input; a tab separates the texts of a pair",
    )
    parser.add_argument("--texts", action="store_true", help="treat every argument as a text, even if it names a file")
    parser.add_argument("--json", action="store_true", help="print one JSON object per text, with all scores")
    parser.add_argument("--out", metavar="FILE", help="write these lines to a file")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="for example task.beams=4")


def run_predict(args: argparse.Namespace) -> int:
    from lockstep.training.predicting import predict

    out = Path(args.out) if args.out else None
    return predict(Path(args.output), args.words, args.set, args.json, out, args.texts)


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    commands.run_file_arguments(parser)
    parser.add_argument("--steps", type=int, default=5, help="steps to compare (default 5)")
    commands.json_option(parser)
    plain = parser.add_mutually_exclusive_group()
    plain.add_argument("--plain", action="store_true", help="compare only with the plain reference")
    plain.add_argument("--no-plain", action="store_true", help="compare only with one process")
    golden = parser.add_mutually_exclusive_group()
    golden.add_argument("--write", metavar="FILE", help="write hashes of these steps instead of comparing them")
    golden.add_argument("--against", metavar="FILE", help="compare with hashes written by --write")
    parser.add_argument("--reference", metavar="COMMAND", help="any command, to trace as the reference (with --job)")
    parser.add_argument("--job", metavar="COMMAND", help="any command, to trace and compare with --reference")
    parser.add_argument("-o", "--output", metavar="DIR", help="folder in which to keep both traces and a page")
    parser.add_argument("--exact", action="store_true", help="with --job: require equal bits")


def run_verify(args: argparse.Namespace) -> int:
    if args.steps < 1:
        raise RunError("LS8100", f"--steps: invalid value {args.steps}; expected an integer >= 1 (steps)")
    if args.reference is not None or args.job is not None:
        return of_commands(args)
    if args.exact:
        raise RunError("LS8101", "--exact is an option for two commands: --reference COMMAND --job COMMAND")
    folder = Path(args.output) if args.output is not None else None
    if folder is not None and (args.write or args.against or args.plain):
        raise RunError(
            "LS8111", "-o keeps traces of a run and of one process, so it cannot be combined with --plain or hashes"
        )
    run = commands.run_of(args)
    if args.write or args.against:
        from lockstep.proof.verify import against, write

        return write(run, args.steps, Path(args.write)) if args.write else against(run, Path(args.against))
    from lockstep.proof.verify import verify

    return verify(run, args.steps, plain=not args.no_plain, single=not args.plain, keep=folder)


def of_commands(args: argparse.Namespace) -> int:
    """Trace two commands and compare them."""
    from lockstep.track.console import Console
    from lockstep_trace.commands import words_of
    from lockstep_trace.terminal import verify

    if args.reference is None or args.job is None:
        raise RunError("LS8102", "verify needs both commands: --reference COMMAND --job COMMAND")
    if args.run is not None or args.overrides or args.write or args.against or args.plain or args.no_plain:
        raise RunError(
            "LS8103", "--reference and --job cannot be combined with a run file or its options; remove one of the two"
        )
    reference, job = words_of("--reference", args.reference), words_of("--job", args.job)
    folder = Path(args.output) if args.output is not None else None
    return verify(reference, job, folder, args.steps, Console(True), args.exact)


def trace_arguments(parser: argparse.ArgumentParser) -> None:
    from lockstep_trace.commands import recording_options

    parser.usage = "lockstep trace [-o DIR] [--every N] [--steps N] [--level LEVEL] -- COMMAND ..."
    recording_options(parser)
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command to run, after --"
    )


def run_trace(args: argparse.Namespace) -> int:
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if not command:
        raise RunError(
            "LS8106",
            "lockstep trace: no command given; write it after --, as in `lockstep trace -o a -- python train.py`",
        )
    from lockstep_trace.commands import recording_settings
    from lockstep_trace.terminal import record

    return record(command, Path(args.output), recording_settings(args), args.verbose)


def init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml", help="the file to write (default: run.yaml), key=value")
    parser.add_argument(
        "--data",
        action="append",
        help="a folder, a file, a Hub id, or builtin/emotion; repeat it for a mixture",
    )
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="FILE",
        help="convert another system's file: a Python script, a command line (.sh), training_args.json, YAML of "
        "axolotl, LLaMA-Factory, TRL or accelerate config, DeepSpeed JSON; no code is run",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="with --from: write the file even if unconverted parts change the training",
    )
    parser.add_argument("--task", help="default: guessed from the columns")
    parser.add_argument("--model", help="Hub id or folder of a pretrained model, or scratch")
    parser.add_argument("--yes", action="store_true", help="ask no questions; accept the guesses")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def run_init(args: argparse.Namespace) -> int:
    from lockstep.lab.init import init, questions

    paths = [word for word in args.words if "=" not in word]
    if len(paths) > 1:
        raise RunError("LS8108", f"init writes one run file at a time, but {' and '.join(paths)} were given")
    first, *more = args.data or [None]
    flags = {"data": first, "task": args.task, "model": args.model}
    ask = None if args.yes or not questions.can_ask() else questions.terminal
    path = Path(paths[0] if paths else "run.yaml")
    overrides = [word for word in args.words if "=" in word]
    if args.origin is not None:
        if more:
            raise RunError(
                "LS8109", "--from: --data can be given once only; write several sources by hand into data.sources"
            )
        from lockstep.lab.import_config import import_config

        return import_config.move(path, Path(args.origin), flags, overrides, args.force, ask, args.partial)
    if args.partial:
        raise RunError("LS8110", "--partial: has an effect only with --from; add --from")
    return init.init(path, flags, overrides, args.force, ask, more)
