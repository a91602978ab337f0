"""Every family of models that transformers knows: which entries of its config add a term to its cross entropy.

In: heads and families to try (all by default). Out: a line of JSON a head and family in --out, which a later call goes
on with: whether its usual config adds a term, which entries do when they are set, and which could not be tried; a
Markdown table with --table. Small models are run by transformers alone; "not refused" is a term that lockstep misses.
Example: python benchmarks/auxiliary_losses.py --out auxiliary.jsonl; then the same with --table
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from families import families, run_of

from lockstep.tasks.models import config_checks, model_configs, small_models

HEADS = ("causal", "seq2seq", "classification", "token_classification", "masked", "question_answering")


def settings(config: Any) -> dict[str, Any]:
    """Config entries that may add a loss term, by path, with a value that would reveal it."""
    found = {}
    for path, part in config_checks._parts(config):
        for name, value in vars(part).items():
            if any(hint in name for hint in config_checks.HINTS):
                if isinstance(value, bool):
                    found[path + name] = not value
                elif type(value) in (int, float) and "norm" not in name and "layer" not in name:
                    found[path + name] = type(value)(value * 3 or 1)
    return found


def outcome(run: Any, head: str, config: Any) -> str:
    """Return `same`, `term`, or the reason why it could not be tried."""
    why = "no small config"
    for wanted in small_models.smaller(config, head):
        try:
            pairs = config_checks.loss_pairs(run.model, head, wanted)
        except Exception as caught:
            why = f"{type(caught).__name__}: {' '.join(str(caught).split())[:100]}"
            continue
        return "same" if config_checks.agree(pairs) else "term"
    return why


def tried(head: str, family: str) -> dict[str, Any]:
    """Try one head and family; returns one line."""
    line: dict[str, Any] = {"head": head, "family": family}
    try:
        run = run_of("causal", family, Path("."), "single")
        config = model_configs.load_config(run.model)
    except Exception as caught:
        return line | {"usual": f"{type(caught).__name__}: {' '.join(str(caught).split())[:100]}"}
    with torch.random.fork_rng([]):
        line["usual"] = outcome(run, head, config)
        if line["usual"] == "same":
            line["entries"] = entries(run, head, config)
        if line["usual"] == "term":
            line["refused"] = config_checks.auxiliary_term(run.model, head, config)
    return line


def entries(run: Any, head: str, config: Any) -> dict[str, str]:
    """Outcome of each entry and of all together: `same`, `term`, or the reason why it could not be tried."""
    wanted = settings(config)
    trials = {path: {path: value} for path, value in wanted.items()}
    trials |= {"all of them": wanted} if len(wanted) > 1 else {}
    found = {}
    for named, values in trials.items():
        other = copy.deepcopy(config)
        for path, value in values.items():
            *outer, last = path.split(".")
            setattr(config_checks._at(other, ".".join(outer)) if outer else other, last, value)
        found[named] = outcome(run, head, other)
        if found[named] == "term" and not config_checks.auxiliary_term(run.model, head, other):
            found[named] = "term that is not refused"
    if "term" in [said for named, said in found.items() if named != "all of them"]:
        found.pop("all of them", None)
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """Format a Markdown table with a row per head and set of entries."""
    rows: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        names = [name for name, said in line.get("entries", {}).items() if said.startswith("term")]
        said = "its usual config" if line["usual"] == "term" else ", ".join(f"`{name}`" for name in names)
        said = said or ("none" if line["usual"] == "same" else "not tried")
        rows.setdefault((line["head"], said), []).append(line["family"])
    body = [f"| {head} | {said} | {', '.join(names)} |" for (head, said), names in sorted(rows.items())]
    return "\n".join(["| head | entries that add a term | families |", "|---|---|---|", *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="*", default=list(HEADS))
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("auxiliary.jsonl"))
    parser.add_argument("--table", action="store_true", help="only print what is in --out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.table:
        print(table(known))
        return
    done = {(line["head"], line["family"]) for line in known}
    for head in options.heads:
        for family in options.families or families(head):
            if (head, family) not in done and family in families(head):
                line = tried(head, family)
                print(json.dumps(line), flush=True)
                with options.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
