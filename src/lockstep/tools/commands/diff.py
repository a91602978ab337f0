"""`lockstep diff`: where two runs, or two traces of commands, part, and why."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.config.run import RunError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="OUTPUT of a run, or a trace: the reference")
    parser.add_argument("b", metavar="B", help="of another")
    parser.add_argument("--quick", action="store_true", help="compare what is written down, and compute nothing again")
    parser.add_argument("--exact", action="store_true", help="of traces: ask for the same bits")
    parser.add_argument("--align", action="store_true", help="of traces: compare windows that saw the same examples")
    parser.add_argument("--perturbed", metavar="DIR", help="of traces: A's command traced again with --perturb")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of both, such as data.train=elsewhere.jsonl")


def main(known: argparse.Namespace) -> int:
    from lockstep.trace.read import is_trace

    both = [is_trace(Path(folder)) for folder in (known.a, known.b)]
    if all(both):
        from lockstep.tools import traces

        perturbed = Path(known.perturbed) if known.perturbed else None
        return traces.diff(Path(known.a), Path(known.b), known.exact, perturbed, known.align)
    if any(both):
        raise RunError(f"{known.a} and {known.b}: one is a trace and the other is not; compare two traces or two runs")
    if known.exact or known.perturbed or known.align:
        raise RunError("--exact, --perturbed and --align are options for traces of `lockstep trace`")
    from lockstep.tools.diff import diff

    return diff(Path(known.a), Path(known.b), known.overrides, look=not known.quick)
