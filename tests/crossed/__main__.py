"""`python -m crossed`: draws runs, judges each in a process of its own, and writes a line of JSON for each.

In: a seed and how many. Out: a record that a later call goes on with; the smallest form of each finding in a folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

from crossed import draw
from crossed.job import job_of
from crossed.process import judged


def main() -> int:
    parser = argparse.ArgumentParser(prog="crossed", description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="runs to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of single runs")
    parser.add_argument("--record", type=Path, help="file of lines that a later call goes on with")
    asked = parser.parse_args()
    done = set()
    if asked.record and asked.record.exists():
        for line in asked.record.read_text().splitlines():
            entry = json.loads(line)
            done.add((entry["seed"], entry["number"]))
    findings = 0
    for number, case in enumerate(itertools.islice(draw.cases(asked.seed), asked.n)):
        if (asked.only is not None and number not in asked.only) or (asked.seed, number) in done:
            continue
        began = time.monotonic()
        verdict = judged(case)
        line = {"seed": asked.seed, "number": number, **verdict.values(), "features": _told(case)}
        findings += verdict.outcome == "finding"
        if asked.record:
            with asked.record.open("a") as file:
                file.write(json.dumps(line) + "\n")
        seconds = time.monotonic() - began
        said = " ".join([verdict.promise, verdict.seen[-600:], verdict.plain])
        print(f"{asked.seed}/{number} {verdict.outcome} {verdict.seconds:.1f} s ({seconds:.1f}) {said}", flush=True)
        if asked.only is not None:
            print(job_of(case).dump())
    print(f"{findings} findings")
    return int(findings > 0)


def _told(case: draw.Case) -> draw.Case:
    """The features of a case that are not the plainest."""
    plain = draw.plainest(case)
    return {name: value for name, value in case.items() if name in ("task", "family") or value != plain[name]}


if __name__ == "__main__":
    sys.exit(main())
