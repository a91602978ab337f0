"""Which families of models go without padding: what `data.padding: none` comes to for each that transformers has.

In: heads and families to try (all by default). Out: a line of JSON a pair in --out; a Markdown table with --table.
Each is tried as a run tries it, from a tiny config: batches of several shapes, with the family's own window and with a
narrow and a wide one; and whether its causal language model reads ahead by itself.
Example: python benchmarks/padding_families.py --out padding.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from families import TASKS, families, run_of

from lockstep.config.run import RunError
from lockstep.tasks.models import model_configs, padding


def tried(head: str, family: str, folder: Path) -> dict[str, Any]:
    """Try one family; returns one line of the table. `padded`: the reason, or None."""
    instead = None
    try:
        run = run_of(head, family, folder, "single")
        config = model_configs.load_config(run.model)
        instead = padding.tried_ahead(run.model, head, config) if head == "causal" else None
        if (entry := model_configs.leaves_out_layers(config)) is not None:
            setattr(config, entry, 0.0)  # LayerDrop is on by default in some; a run may set it to 0
        why = padding.trial(run.model, head, config)
    except (RunError, Exception) as error:
        why = f"a small model of this family could not be tried ({' '.join(str(error).split())[:120]})"
    return {"head": head, "family": family, "padded": why} | ({"reads_ahead": instead} if instead else {})


def table(lines: list[dict[str, Any]]) -> str:
    """Format as Markdown: families without padding as one list per head, the others by reason."""
    said = []
    for head in TASKS:
        ours = sorted((x for x in lines if x["head"] == head), key=lambda x: x["family"])
        if not ours:
            continue
        free = [x["family"] for x in ours if x["padded"] is None]
        said.append(f"### {head}\n\nWithout padding ({len(free)} of {len(ours)}): {', '.join(free)}.\n")
        reasons: dict[str, list[str]] = {}
        for line in (x for x in ours if x["padded"] is not None):
            reasons.setdefault(line["padded"].partition(" (")[0], []).append(line["family"])
        said.append("| padded, because | families |\n|---|---|")
        said += [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(reasons.items())]
        said.append("")
        if ahead := [x["family"] for x in ours if x.get("reads_ahead")]:
            said.append(f"Refused for `language_modeling`, because they read ahead: {', '.join(ahead)}.\n")
    return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="*", default=list(TASKS))
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("padding.jsonl"))
    parser.add_argument("--table", action="store_true", help="only print what is in --out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known = [json.loads(x) for x in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.table:
        print(table(known))
        return
    done = {(x["head"], x["family"]) for x in known}
    with tempfile.TemporaryDirectory() as name:
        for head in options.heads:
            for family in options.families or families(head):
                if (head, family) in done or family not in families(head):
                    continue
                before = time.monotonic()
                line = tried(head, family, Path(name))
                print(f"{time.monotonic() - before:.1f} s", line, flush=True)
                with options.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
