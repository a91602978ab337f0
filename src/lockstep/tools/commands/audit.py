"""`lockstep audit`: whether a run is what was attested of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.config.run import RunError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT")
    parser.add_argument("--samples", type=int, default=5, help="steps that are drawn (default 5)")
    parser.add_argument(
        "--within", type=int, default=50, help="drawn from those so many steps after a checkpoint or the start (50)"
    )
    parser.add_argument("--processes", type=int, help="default: 1, or 2 where the run had 1")
    parser.add_argument("--key", type=Path, help="public key (PEM) of the signature")
    parser.add_argument("--seed", type=int, help="of the draw; default: another one each time")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example data.train=elsewhere.jsonl")


def main(known: argparse.Namespace) -> int:
    for name in ("samples", "within", "processes"):
        if (value := getattr(known, name)) is not None and value < 1:
            raise RunError(f"--{name}: {value} is not a positive number")
    from lockstep.tools.attest import audit

    return audit(
        Path(known.output), known.samples, known.within, known.processes, known.key, known.overrides, known.seed
    )
