"""show the names and shapes of an exported model's weights

In: the output folder of a run. Out: a line for each weight.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep import RunError


def weights_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT", help="output folder of a run")


def run_weights(known: argparse.Namespace) -> int:
    from safetensors import safe_open

    files = sorted(Path(known.output, "export").glob("*.safetensors"))
    if not files:
        raise RunError(f"{known.output} holds no export: train the run to its end")
    for file in files:
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                print(f"{name:<50}{tuple(weights.get_slice(name).get_shape())}")
    return 0
