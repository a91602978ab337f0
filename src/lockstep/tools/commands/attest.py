"""`lockstep attest`: what a run was made of and what it left, as one chain of hashes."""

from __future__ import annotations

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT")
    parser.add_argument("--key", type=Path, help="private key of an elliptic curve (PEM) to sign it with")


def main(known: argparse.Namespace) -> int:
    from lockstep.tools.attest import attest

    return attest(Path(known.output), known.key)
