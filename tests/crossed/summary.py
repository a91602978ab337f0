"""`python -m crossed.summary RECORD...`: summarizes a record of drawn runs as Markdown.

In: files that `python -m crossed --record` wrote. Out: how many were as promised, refused and not; by feature; pairs of
features; why runs were refused; what was not as promised.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from crossed import draw


def main() -> None:
    lines = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    cases = [_case(line["features"]) for line in lines]
    outcomes = Counter(line["outcome"] for line in lines)
    seconds = sum(line.get("seconds", 0.0) for line in lines)
    seeds = ", ".join(f"{seed} ({count:,} runs)" for seed, count in Counter(line["seed"] for line in lines).items())
    print(f"Seeds: {seeds}. {len(lines):,} runs, {seconds / 3600:.2f} hours of processor time.\n")
    print("| outcome | runs |\n|---|---:|")
    for outcome in ("promised", "refused", "finding"):
        print(f"| {outcome} | {outcomes[outcome]:,} |")
    trained = [line for line in lines if line["outcome"] == "promised"]
    bits = sum(bool(line.get("bits")) for line in trained)
    examples = sum(line.get("examples", 0) for line in trained)
    print(
        f"\nOf the trained, {bits:,} were compared bit for bit and the others to rounding; {examples:,} examples were "
    )
    print("evaluated, each once an evaluation.\n\n| beside the plain reference | runs |\n|---|---:|")
    for told, count in Counter(_plain(line.get("plain", "")) for line in trained).most_common():
        print(f"| {told} | {count:,} |")
    _features(lines, cases)
    _pairs(lines, cases)
    _reasons(lines)


def _case(features: dict[str, Any]) -> draw.Case:
    """Return the whole case of a record, whose other features are the plainest ones."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in features.items()}
    return draw.plainest(given) | given


def _plain(told: str) -> str:
    """Return the description of a comparison without its numbers."""
    steps, _, why = told.partition("; ")
    return f"compared{f' in part: {why}' if why else ''}" if steps[:1].isdigit() else f"not compared: {told or '?'}"


def _features(lines: list[dict[str, Any]], cases: list[draw.Case]) -> None:
    """Print how many cases were trained, refused or not as promised, by feature value; families by number of cases."""
    found: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for line, case in zip(lines, cases, strict=True):
        for feature, value in case.items():
            found[feature][str(value)][line["outcome"]] += 1
    print("\n| feature | values: trained / refused / not as promised |\n|---|---|")
    for feature, values in found.items():
        if feature == "family":
            trained = sum(count["promised"] > 0 for count in values.values())
            print(f"| family | {len(values)} drawn, {trained} trained |")
            continue
        told = [f"{value} {c['promised']}/{c['refused']}/{c['finding']}" for value, c in sorted(values.items())]
        print(f"| {feature} | {', '.join(told)} |")


def _pairs(lines: list[dict[str, Any]], cases: list[draw.Case]) -> None:
    """Print the number of tried pairs of values."""
    tried: Counter[tuple[str, str]] = Counter()
    trained: set[tuple[str, str]] = set()
    for line, case in zip(lines, cases, strict=True):
        found = draw.pairs(case)
        tried.update(found)
        if line["outcome"] == "promised":
            trained |= found
    print(
        f"\nPairs of values of two features, one of them not the plainest: {len(tried):,} tried, {len(trained):,} in a"
    )
    print(f"run that trained, {sum(count > 4 for count in tried.values()):,} five times or more.")


def _reasons(lines: list[dict[str, Any]]) -> None:
    """Print the reasons of refusals, by key and first words, and the broken promises."""
    reasons: Counter[str] = Counter()
    for line in lines:
        if line["outcome"] == "refused":
            text = re.sub(r"^(alone|first way|second way): ", "", line["seen"])
            reasons[re.sub(r"'[^']*'|\d[\d,.]*", "...", text)[:90].replace("|", "/")] += 1
    print("\n| refused because | runs |\n|---|---:|")
    for reason, count in reasons.most_common():
        print(f"| {reason} | {count} |")
    print("\n| not as promised | seen | run |\n|---|---|---|")
    for line in lines:
        if line["outcome"] == "finding":
            seen = " ".join(line["seen"].split())[-160:].replace("|", "/")
            print(f"| {line['promise']} | {seen} | {line['seed']}/{line['number']} |")


if __name__ == "__main__":
    main()
