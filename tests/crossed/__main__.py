"""`python -m crossed`: draws runs, judges each in a separate process, and prints the verdicts.

In: a seed and how many. Out: status 1 where a run broke a promise, its smallest form in `cases/`, and with --record a
line of JSON for each run, which a later call goes on with.
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
from crossed.judge import Verdict
from crossed.process import judged
from crossed.shrink import CASES, shrink, special, written


def main() -> int:
    parser = argparse.ArgumentParser(prog="crossed", description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="runs to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="FEATURE=VALUE,...",
        help="draw these values of a feature only, e.g. task=image_classification,module",
    )
    parser.add_argument("--only", type=int, nargs="*", help="numbers of single runs, which are shown")
    parser.add_argument("--record", type=Path, help="file of lines that a later call goes on with")
    parser.add_argument("--cases", type=Path, default=CASES, help="folder for the smallest forms of what fails")
    parser.add_argument("--no-shrink", action="store_true", help="write nothing there")
    parser.add_argument("--gpu", action="store_true", help="ranks share the GPU; what fails is not made smaller")
    parser.add_argument("--first", action="store_true", help="end at the first run that breaks a promise")
    asked = parser.parse_args()
    fixed = {feature: values.split(",") for feature, _, values in (each.partition("=") for each in asked.fix)}
    if unknown := fixed.keys() - draw.FEATURES.keys():
        parser.error(f"--fix: unknown feature {', '.join(sorted(unknown))}; expected of {', '.join(draw.FEATURES)}")
    if undrawn := draw.never_drawn(fixed):
        parser.error(f"--fix: no run has {', '.join(undrawn)}")
    counts = {"promised": 0, "refused": 0, "finding": 0}
    done = _recorded(asked.record)
    for number, case in enumerate(itertools.islice(draw.cases(asked.seed, fixed), asked.n)):
        if (asked.only is not None and number not in asked.only) or (asked.seed, number) in done:
            continue
        began = time.monotonic()
        job = job_of(case).on_gpu() if asked.gpu else job_of(case)
        if asked.only is not None:
            print(job.dump())
        verdict = judged(job)
        counts[verdict.outcome] += 1
        _tell(asked.seed, number, verdict, time.monotonic() - began)
        if asked.record:
            line = {"seed": asked.seed, "number": number, **verdict.values(), "features": special(case)}
            with asked.record.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if verdict.outcome == "finding" and not asked.no_shrink and not asked.gpu:
            smallest, seen = shrink(case, verdict, judged)
            print(f"its smallest form: {written(smallest, seen, f'seed-{asked.seed}-{number}', asked.cases)}")
        if verdict.outcome == "finding" and asked.first:
            break
    print(f"{counts['promised']} as promised, {counts['refused']} refused, {counts['finding']} not as promised")
    return int(counts["finding"] > 0)


def _recorded(record: Path | None) -> set[tuple[int, int]]:
    """Return (seed, number) of each run in a record."""
    lines = record.read_text().splitlines() if record and record.exists() else []
    return {(entry["seed"], entry["number"]) for entry in map(json.loads, lines)}


def _tell(seed: int, number: int, verdict: Verdict, seconds: float) -> None:
    said = " ".join(filter(None, [verdict.promise, verdict.seen[-800:], verdict.plain]))
    print(f"{seed}/{number} {verdict.outcome}, {verdict.seconds:.1f} s ({seconds:.1f}) {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
