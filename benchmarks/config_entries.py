"""Every family of models that transformers knows: which entries of its config lockstep takes, and which change nothing.

In: families (all by default). Out: a line of JSON a family in --out, which a later call goes on with: entries that are
refused when they are set to what they are anyway or to another value, and those that come to another config than
transformers makes; and by head which dropouts a note says have no effect. A Markdown table with --table.
Example: python benchmarks/config_entries.py --out config-entries.jsonl; then the same with --table
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from families import families, run_of, small
from transformers import CONFIG_MAPPING, PreTrainedConfig

from lockstep.config.run import RunError
from lockstep.tasks.models import config_checks, model_configs

HEADS = ("causal", "seq2seq", "classification", "token_classification", "masked", "question_answering")
ELSEWHERE = {"return_dict", "dtype", "torch_dtype", "model_type", "transformers_version", "architectures"}


def other(value: Any) -> Any:
    """Return another value of the same type, or None."""
    if isinstance(value, bool):
        return not value
    return value * 2 or 1 if isinstance(value, int | float) else None


def legal(kind: Any) -> dict[str, Any]:
    """Entries that lockstep refuses when set alone, and those that give another config than in transformers."""
    usual = kind()
    line: dict[str, Any] = {"entries": 0, "refused": {}, "another": []}
    for name, value in vars(usual).items():
        if name.startswith("_") or name in ELSEWHERE or isinstance(value, PreTrainedConfig):
            continue
        line["entries"] += 1
        for wanted in (value, other(value)):
            try:
                made = kind(**{name: wanted}).to_dict()
            except Exception:  # transformers rejects the value
                continue
            try:
                found = model_configs.from_scratch(kind, {name: wanted}).to_dict()
            except RunError as error:
                line["refused"][name] = str(error)[:200]
                continue
            if found != made:
                line["another"].append(name)
    return line


def inert(family: str, head: str) -> dict[str, Any]:
    """Return the tried dropout entries without effect under this head."""
    entries = {
        name: value
        for name, value in vars(CONFIG_MAPPING[family]()).items()
        if config_checks.DROPOUT in name and isinstance(value, float | int)
    }
    run = run_of("causal", family, Path("."), "single")
    tried: dict[str, Any] = {"tried": [], "inert": []}
    with torch.random.fork_rng([]):
        for name, value in entries.items():
            if not config_checks._is_tried(name, value):
                continue
            model = run.model.model_copy(update={"config": small(family) | {name: value}})
            tried["tried"].append(name)
            if not config_checks.acts(run.model_copy(update={"model": model}).model, head, name, value):
                tried["inert"].append(name)
    return tried


def line_of(family: str, trials: bool) -> dict[str, Any]:
    line: dict[str, Any] = {"family": family}
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            line |= legal(CONFIG_MAPPING[family])
        except Exception as error:
            return line | {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
        for head in HEADS if trials else ():
            if family in families(head):
                try:
                    line[head] = inert(family, head)
                except Exception as error:
                    line[head] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return line


def table(lines: list[dict[str, Any]]) -> str:
    """Format as Markdown: how much was tried, and a row per entry without effect."""
    made = [line for line in lines if "failed" not in line]
    rows: dict[tuple[str, str], list[str]] = {}
    for line in made:
        for head in HEADS:
            if isinstance(line.get(head), dict):
                for name in line[head]["inert"]:
                    rows.setdefault((head, name), []).append(line["family"])
    sums = [sum(len(line[name]) for line in made) for name in ("refused", "another")]
    facts = [
        f"{len(made)} families, {sum(line['entries'] for line in made)} entries; refused: {sums[0]}; another config "
        f"than transformers makes: {sums[1]}; not made by transformers without entries: {len(lines) - len(made)}",
        "",
        "| head | entry | has no effect in |",
        "|---|---|---|",
    ]
    return "\n".join(
        facts + [f"| {head} | `{name}` | {', '.join(who)} |" for (head, name), who in sorted(rows.items())]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("config-entries.jsonl"))
    parser.add_argument("--entries-only", action="store_true", help="no trials of what changes nothing")
    parser.add_argument("--table", action="store_true", help="only print what is in --out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.table:
        print(table(known))
        return
    done = {line["family"] for line in known}
    wanted = sorted({family for head in HEADS for family in families(head) if family in CONFIG_MAPPING})
    for family in options.families or wanted:
        if family not in done:
            line = line_of(family, not options.entries_only)
            print(json.dumps(line), flush=True)
            with options.out.open("a") as out:
                out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
