"""`lockstep predict`: what an exported model makes of texts."""

from __future__ import annotations

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT[/checkpoints/step-N]")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="TEXT|FILE",
        help="a text, or a file of them: .jsonl, .json, .csv, .tsv and .parquet by the columns of the run, .txt a line "
        "each; default: the lines of standard input; a tab between the texts of a pair",
    )
    parser.add_argument("--texts", action="store_true", help="every word is a text, also one that looks like a file")
    parser.add_argument("--json", action="store_true", help="an object a line, with all scores")
    parser.add_argument("--out", metavar="FILE", help="write these lines to a file")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="for example task.beams=4")


def main(known: argparse.Namespace) -> int:
    from lockstep.training.predicting import predict

    out = Path(known.out) if known.out else None
    return predict(Path(known.output), known.words, known.set, known.json, out, known.texts)
