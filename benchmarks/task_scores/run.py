"""Real scores of the tasks, each beside the library that people use for it: the same rows, start, steps and recipe.

In: a folder with emotion, multi30k and tinyshakespeare, a folder with all-MiniLM-L6-v2. Out: JSON, one
entry for each recipe and seed, written after each; a table on the terminal. Needs the extra `compared`.

python benchmarks/task_scores/run.py DATA --model MINILM --only retrieval dpo --seeds 2 --out FILE
One core and one thread: some minutes for each recipe and seed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import answers
import labels
import masks
import vectors
import words
import writers

RECIPES = vectors.RECIPES | labels.RECIPES | masks.RECIPES | answers.RECIPES | words.RECIPES | writers.RECIPES
LIBRARIES = (
    "torch", "transformers", "sentence-transformers", "trl", "scikit-learn", "scipy", "seqeval", "sacrebleu",
    "rouge-score", "torchmetrics",
)  # fmt: skip


def where() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Means over seeds, with the smallest and the largest where there are several."""
    lines = []
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        of = [run["sides"] for run in runs if run["recipe"] == recipe]
        names = list(of[0]["lockstep"])
        lines += [f"{recipe} ({len(of)} seeds)", "| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for side in of[0]:
            if not set(names) <= of[0][side].keys():
                continue
            cells = []
            for name in names:
                found = [sides[side][name] for sides in of]
                spread = f" ({min(found):.4g} to {max(found):.4g})" if max(found) > min(found) else ""
                cells.append(f"{statistics.mean(found):.4g}{spread}")
            lines.append(f"| {side} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--only", nargs="*", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found = json.loads(asked.out.read_text()) if asked.out.exists() else {"where": where(), "runs": []}
    done = {(run["recipe"], run["seed"]) for run in found["runs"]}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(asked.seeds):
            for recipe in asked.only:
                if (recipe, seed) in done:
                    continue
                room = Path(folder) / f"{recipe}-{seed}"
                sides = RECIPES[recipe](asked.data.resolve(), asked.model.resolve(), room, seed)
                print(recipe, seed, json.dumps(sides), flush=True)
                found["runs"].append({"recipe": recipe, "seed": seed, "sides": sides})
                asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found["runs"])))


if __name__ == "__main__":
    main()
