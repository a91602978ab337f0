"""`lockstep schema`: the JSON Schema of run files, for editors."""

from __future__ import annotations

import argparse
import json

from lockstep.config.run import schema


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def main(known: argparse.Namespace) -> int:
    print(json.dumps(schema(), indent=2))
    return 0
