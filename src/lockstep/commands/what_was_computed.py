"""Commands that inspect a computation: `lockstep diff`, `replay`, `branch`, `attest` and `audit`.

In: the parser, then the parsed command line. Out: an exit status.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep import commands
from lockstep.config.run import RunError
from lockstep.distributed.signals import say_what_ended
from lockstep.track import json_output


def diff_arguments(parser: argparse.ArgumentParser) -> None:
    from lockstep_trace.commands import comparing_options

    parser.add_argument("a", metavar="A", help="OUTPUT of a run, or a trace: the reference")
    parser.add_argument("b", metavar="B", help="of another")
    parser.add_argument("--quick", action="store_true", help="compare only what is recorded, and recompute nothing")
    comparing_options(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides for both, such as data.train=elsewhere.jsonl"
    )
    commands.json_option(parser)


def run_diff(args: argparse.Namespace) -> int:
    from lockstep_trace.read import is_trace

    both = [is_trace(Path(folder)) for folder in (args.a, args.b)]
    if all(both):
        from lockstep.track.console import Console
        from lockstep_trace.terminal import diff as diff_traces

        perturbed = Path(args.perturbed) if args.perturbed else None
        return diff_traces(Path(args.a), Path(args.b), Console(True), args.exact, perturbed, args.align, args.verbose)
    if any(both):
        raise RunError(
            "LS8120", f"{args.a} and {args.b}: one is a trace and the other a run; compare two traces or two runs"
        )
    if args.exact or args.perturbed or args.align:
        raise RunError(
            "LS8121", "--exact, --perturbed and --align apply only to traces of `lockstep trace`; remove them"
        )
    from lockstep.proof.diff import diff

    return diff(Path(args.a), Path(args.b), args.overrides, look=not args.quick)


def replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT")
    parser.add_argument("--step", type=int, required=True, help="number of the step, from 1, as in metrics.jsonl")
    parser.add_argument("--processes", type=int, default=1, help="default 1")
    parser.add_argument("--strategy", help="default: single, or ddp with several processes; the run's own if not exact")
    parser.add_argument(
        "--from",
        dest="begin",
        type=int,
        metavar="STEP",
        help="begin at the newest checkpoint of at most this step; 0: the start",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example data.train=elsewhere.jsonl")
    commands.json_option(parser)


def run_replay(args: argparse.Namespace) -> int:
    if args.processes < 1:
        raise RunError("LS8122", f"--processes: invalid value {args.processes}; expected an integer >= 1")
    from lockstep.proof.replay import replay

    return replay(Path(args.output), args.step, args.overrides, args.strategy, args.processes, args.begin)


def branch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("begins_with", metavar="OUTPUT@N", help="a run, and the number of its steps to share")
    commands.run_file_arguments(parser)
    commands.json_option(parser)


def run_branch(args: argparse.Namespace) -> int:
    from lockstep.lab.branch import branch

    say_what_ended()
    run = commands.run_of(args)
    logged = json_output.log_end(run.folder)
    return json_output.of_training(branch(args.begins_with, run), run.folder, logged)


def attest_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT")
    parser.add_argument("--key", type=Path, help="elliptic-curve private key (PEM) to sign with")


def run_attest(args: argparse.Namespace) -> int:
    from lockstep.proof.attest import attest

    return attest(Path(args.output), args.key)


def audit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT")
    parser.add_argument("--samples", type=int, default=5, help="number of random steps to recompute (default 5)")
    parser.add_argument(
        "--within",
        type=int,
        default=50,
        help="draw only steps within this many after a checkpoint or the start (default 50)",
    )
    parser.add_argument("--processes", type=int, help="default: 1, or 2 where the run had 1")
    parser.add_argument("--key", type=Path, help="public key (PEM) of the signature")
    parser.add_argument("--seed", type=int, help="seed of the draw; default: random")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example data.train=elsewhere.jsonl")
    commands.json_option(parser)


def run_audit(args: argparse.Namespace) -> int:
    for name in ("samples", "within", "processes"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise RunError("LS8123", f"--{name}: invalid value {value}; expected a number > 0")
    from lockstep.proof.attest import audit

    return audit(Path(args.output), args.samples, args.within, args.processes, args.key, args.overrides, args.seed)
