"""The command `lockstep-trace`: record, diff, verify, report, watch.

In: the command line. Out: an exit status: 0, 1 if two traces differ, 2 for an error message, or a traced command's
own.
"""

from __future__ import annotations

import argparse
import errno
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep_trace import DEFAULT, __version__, streams
from lockstep_trace.coded import TraceError, coded
from lockstep_trace.redaction import redact
from lockstep_trace.tracer import CHECKED, LEVELS

WATCH_S = 2.0  # polling interval of a trace that is being written


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return the exit status."""
    streams.make_safe()
    try:
        args = _parser().parse_args(arguments)
    except SystemExit as ended:  # argparse has printed help, or a message
        if ended.code == 0 and _output_is_incomplete():
            return 1
        raise
    try:
        status = int(args.run(args))
    except TraceError as error:
        print(f"lockstep-trace: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 1 if status == 0 and _output_is_incomplete() else status


def _output_is_incomplete() -> bool:
    """Report printed output that could not be written. Returns whether there is any."""
    if (lost := streams.unwritten()) is None:
        return False
    text = f"standard output: {lost.strerror}; the printed output is incomplete"
    text += "; free some space" if lost.errno == errno.ENOSPC else ""
    print(f"lockstep-trace: {coded('LS9130', text)}", file=sys.stderr)
    return True


def recording_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `record`, shared with `lockstep trace`."""
    parser.add_argument("-o", "--output", metavar="DIR", default=DEFAULT, help="folder of the trace")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="measure tensors at each N-th step (default 1)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="record the first N steps; the command continues")
    parser.add_argument("--level", choices=LEVELS, default="gradients", help="level of detail (default gradients)")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="with --level operations: the step whose operations are recorded (default: the one in which `diff` saw "
        "the first difference of the trace in DIR, else 0)",
    )
    parser.add_argument(
        "--perturb", action="store_true", help="flip the last bit of half of the weights before the first forward"
    )
    parser.add_argument(
        "--check",
        type=int,
        nargs="*",
        metavar="STEP",
        help="recompute these steps on copies inside the command, and compare (default 1 and 10, counted from 0)",
    )
    verbose_option(parser)


def verbose_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verbose", action="store_true", help="also print unproved findings, with other explanations")


def recording_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the recorder's settings from parsed `recording_options`. Errors: `TraceError`."""
    for name in ("every", "steps"):
        require_positive(f"--{name}", getattr(args, name))
    _require_step(args.step, args.steps, args.level)
    settings: dict[str, object] = {name: getattr(args, name) for name in ("every", "steps", "level", "perturb", "step")}
    if args.check is not None:
        settings["check"] = checked_steps(args.check or CHECKED)
    return settings


def _require_step(step: int | None, steps: int | None, level: str) -> None:
    if step is None:
        return
    if level != "operations":
        raise TraceError("LS9183", f"--step {step} chooses a step for --level operations; the level is {level}")
    if step < 0:
        raise TraceError("LS9184", f"--step: invalid value {step}; expected an integer >= 0")
    if steps is not None and step >= steps:
        raise TraceError("LS9185", f"--step {step}: --steps {steps} records the steps 0 to {steps - 1}; raise --steps")


def checked_steps(steps: Sequence[int]) -> tuple[int, ...]:
    """Return the steps to check, in order. Errors: `TraceError` for a negative one."""
    for step in steps:
        if step < 0:
            raise TraceError("LS9190", f"--check: invalid value {step}; expected a step >= 0, counted from 0")
    return tuple(sorted(set(steps)))


def require_positive(option: str, value: int | None) -> None:
    """Check that a number, if given, is at least 1. Errors: `TraceError`."""
    if value is not None and value < 1:
        raise TraceError("LS9034", f"{option}: invalid value {value}; expected an integer >= 1")


def comparing_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `diff` for traces, shared with `lockstep diff`."""
    parser.add_argument("--exact", action="store_true", help="of traces: require equal bits")
    parser.add_argument(
        "--align", action="store_true", help="of traces: compare windows of steps with the same examples"
    )
    parser.add_argument("--perturbed", metavar="DIR", help="of traces: A's command traced again with --perturb")
    parser.add_argument("--verbose", action="store_true", help="of traces: also print unproved findings")


def words_of(option: str, text: str | None) -> list[str]:
    """Split a command into words. Errors: `TraceError`."""
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise TraceError("LS9035", f"{option}: invalid command {redact(text or '')!r}: {error}") from None
    if not words:
        raise TraceError("LS9036", f'{option}: no command given; expected one, such as {option} "python train.py"')
    return words


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep-trace", description="Record each optimizer step of a training, and compare recordings."
    )
    parser.add_argument("--version", action="version", version=f"lockstep-trace {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    record = commands.add_parser("record", help="run a training command and record each optimizer step")
    recording_options(record)
    record.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    record.set_defaults(run=_record)

    diff = commands.add_parser("diff", help="name the first step and value in which two traces differ")
    diff.add_argument("a", metavar="A", type=Path, help="the reference")
    diff.add_argument("b", metavar="B", type=Path, help="the trace to compare with it")
    comparing_options(diff)
    diff.set_defaults(run=_diff)

    verify = commands.add_parser("verify", help="record two commands and compare them, with a measured tolerance")
    verify.add_argument("--reference", metavar="COMMAND", required=True, help="as one text in quotes")
    verify.add_argument("--job", metavar="COMMAND", required=True, help="compared with the reference")
    verify.add_argument("-o", "--output", metavar="DIR", type=Path, help="keep both traces and a page here")
    verify.add_argument("--steps", type=int, metavar="N", help="compare the first N steps")
    verify.add_argument("--exact", action="store_true", help="require equal bits")
    verify.set_defaults(run=_verify)

    report = commands.add_parser("report", help="write the page of a trace, compared with a reference if given")
    report.add_argument(
        "folders", metavar="TRACE", type=Path, nargs="+", help="one trace, or the reference and a trace"
    )
    report.set_defaults(run=_report)

    watch = commands.add_parser("watch", help="follow a trace while its command runs, and print findings as they occur")
    watch.add_argument("folder", metavar="TRACE", type=Path)
    verbose_option(watch)
    watch.set_defaults(run=_watch)
    return parser


def _record(args: argparse.Namespace) -> int:
    from lockstep_trace.terminal import record

    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise TraceError(
            "LS9037",
            "record: no command given; write it after --, as in `lockstep-trace record -o a -- python train.py`",
        )
    return record(words, Path(args.output), recording_settings(args), args.verbose)


def _diff(args: argparse.Namespace) -> int:
    from lockstep_trace.terminal import PlainOutput, diff

    perturbed = Path(args.perturbed) if args.perturbed else None
    return diff(args.a, args.b, PlainOutput(), args.exact, perturbed, args.align, args.verbose)


def _verify(args: argparse.Namespace) -> int:
    from lockstep_trace.terminal import PlainOutput, verify

    require_positive("--steps", args.steps)
    commands = words_of("--reference", args.reference), words_of("--job", args.job)
    return verify(*commands, args.output, args.steps, PlainOutput(), args.exact)


def _report(args: argparse.Namespace) -> int:
    from lockstep_trace.report import write

    if len(args.folders) > 2:
        raise TraceError(
            "LS9038", f"report: {len(args.folders)} folders given; expected one trace, or a reference and a trace"
        )
    reference = args.folders[0] if len(args.folders) == 2 else None
    print(write(args.folders[-1], reference))
    return 0


def _watch(args: argparse.Namespace) -> int:
    from lockstep_trace.findings import findings, proved
    from lockstep_trace.read import about, is_trace, read
    from lockstep_trace.terminal import finding_lines

    printed: set[str] = set()
    steps = 0
    while True:
        if not is_trace(args.folder):
            raise TraceError(
                "LS9039", f"{args.folder} is not a trace; expected the folder of `lockstep-trace record -o`"
            )
        command = about(args.folder)
        status, complete = command.get("status"), False
        try:
            trace = read(args.folder)
        except TraceError as error:
            if status is not None:
                print(str(error))
                return int(status)
        else:
            count = sum(len(trace.steps(optimizer)) for optimizer in trace.optimizers)
            if count > steps:
                steps = count
                print(f"{steps} optimizer steps on {trace.world} process{'es' if trace.world > 1 else ''}", flush=True)
            rows = findings(trace)
            for each in rows if args.verbose else proved(rows):
                if each.code not in printed:
                    printed.add(each.code)
                    print(*finding_lines([each]), sep="\n", flush=True)
            complete = not command and len(trace.ranks) == trace.world and all(r.ended for r in trace.ranks)
        if complete:  # recorded without a command, whose status would be in the folder
            print("the recording is complete")
            return 0
        if status is not None:
            print(f"the command ended with status {status}")
            return int(status)
        if streams.reader_is_gone():
            return 0
        time.sleep(WATCH_S)
