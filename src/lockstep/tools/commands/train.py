"""`lockstep train`: train a run file to its end, or go on with it."""

from __future__ import annotations

import argparse

from lockstep.distributed.signals import say_what_ended
from lockstep.launchers import start
from lockstep.tools.commands import run_file


def arguments(parser: argparse.ArgumentParser) -> None:
    run_file.arguments(parser)
    voice = parser.add_mutually_exclusive_group()
    voice.add_argument("--quiet", action="store_true", help="say notes and errors only (track.console=quiet)")
    voice.add_argument("--verbose", action="store_true", help="say every line of the log (track.console=verbose)")
    parser.add_argument("--detach", action="store_true", help="do not follow a job that was submitted (launch.detach)")


def main(known: argparse.Namespace) -> int:
    known.overrides += [f"track.console={voice}" for voice in ("quiet", "verbose") if getattr(known, voice)]
    known.overrides += ["launch.detach=true"] if known.detach else []
    say_what_ended()
    return start.train(run_file.run_of(known))
