"""`lockstep verify`: is this the same training as on one process?"""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.config.run import RunError
from lockstep.tools.commands import run_file


def arguments(parser: argparse.ArgumentParser) -> None:
    run_file.arguments(parser)
    parser.add_argument("--steps", type=int, default=5, help="steps to compare (default 5)")
    plain = parser.add_mutually_exclusive_group()
    plain.add_argument("--plain", action="store_true", help="compare with the plain reference, and with nothing else")
    plain.add_argument("--no-plain", action="store_true", help="compare with one process, and not with the reference")
    golden = parser.add_mutually_exclusive_group()
    golden.add_argument("--write", metavar="FILE", help="write down hashes of these steps instead of comparing them")
    golden.add_argument("--against", metavar="FILE", help="compare with hashes that --write has written")
    parser.add_argument("--reference", metavar="COMMAND", help="any command, to trace as the reference (with --job)")
    parser.add_argument("--job", metavar="COMMAND", help="any command, to trace and compare with --reference")
    parser.add_argument("-o", "--output", metavar="DIR", help="of --job: keep the traces and a page here")
    parser.add_argument("--exact", action="store_true", help="of --job: ask for the same bits")


def main(known: argparse.Namespace) -> int:
    if known.steps < 1:
        raise RunError(f"--steps: {known.steps} is not a positive number of steps")
    if known.reference is not None or known.job is not None:
        return of_commands(known)
    if known.output is not None or known.exact:
        raise RunError("-o and --exact are options for two commands: --reference COMMAND --job COMMAND")
    run = run_file.run_of(known)
    if known.write or known.against:
        from lockstep.tools import golden

        return (
            golden.write(run, known.steps, Path(known.write))
            if known.write
            else golden.against(run, Path(known.against))
        )
    from lockstep.tools.verify import verify

    return verify(run, known.steps, plain=not known.no_plain, single=not known.plain)


def of_commands(known: argparse.Namespace) -> int:
    """Trace two commands and compare them."""
    import shlex

    from lockstep.tools import traces

    if known.reference is None or known.job is None:
        raise RunError("verify of commands needs both: --reference COMMAND --job COMMAND")
    if known.run is not None or known.overrides or known.write or known.against or known.plain or known.no_plain:
        raise RunError("--reference and --job take no run file, and no option for one")
    try:
        reference, job = shlex.split(known.reference), shlex.split(known.job)
    except ValueError as error:
        raise RunError(f"--reference, --job: {error}") from None
    if not reference or not job:
        raise RunError("--reference, --job: an empty command")
    folder = Path(known.output) if known.output is not None else None
    return traces.verify(reference, job, folder, known.steps, known.exact)
