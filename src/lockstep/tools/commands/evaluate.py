"""`lockstep evaluate`: metrics of an exported model."""

from __future__ import annotations

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT[/checkpoints/step-N]")
    parser.add_argument("--split", help="train, validation or test; default: the last two")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example task.beams=4")


def main(known: argparse.Namespace) -> int:
    from lockstep.training.exported_model import evaluate

    return evaluate(Path(known.output), known.split, known.overrides)
