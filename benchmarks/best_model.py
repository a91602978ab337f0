"""The last model or the best evaluated one: what `checkpoint.best` would have changed in small runs of the recipes.

    python benchmarks/best_model.py DATA MINILM [--room FOLDER] [--only NAME ...] [--times N ...] > FILE.jsonl
    python benchmarks/best_model.py --table FILE.jsonl

In: a folder with emotion, multi30k and tinyshakespeare, and one with all-MiniLM-L6-v2; run files of runs/ and files
that `lockstep init` writes, on fewer rows. Each is trained for its own epochs and for four times as many, with eight
evaluations and a checkpoint at each. Out: a line of JSON a run: the steps of the last model and of the best by
validation loss and by the task's score, and what each reaches on the test split (or a tenth of train, set apart; of
runs/own, which have no test split, on validation).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
EVALUATIONS = 8  # in each run, evenly spread
TIMES = [1, 4]  # the recipe's epochs, and a run that somebody made longer
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


@dataclass(frozen=True)
class Recipe:
    """A file of runs/, or data for `lockstep init`, and what makes it small."""

    file: str  # in runs/; empty: written by `lockstep init`
    rows: int  # most training rows; 0: all
    batch: int
    score: str  # of validation and test, besides the loss; empty: none
    source: str = ""  # folder in DATA
    keys: tuple[str, ...] = ()
    steps: int = 0  # of a recipe that counts steps and not epochs


TRANSLATED = ("evaluate.limit=100", "task.samples=0")
RECIPES = {
    "init: labels of 1,000 texts": Recipe("", 1000, 32, "accuracy", "emotion"),
    "init: labels of 8,000 texts": Recipe("", 8000, 64, "accuracy", "emotion"),
    "init: language model": Recipe("", 0, 64, "", "tinyshakespeare", ("data.test_fraction=0.1", "task.samples=0")),
    "init: translation": Recipe("", 4000, 64, "bleu", "multi30k", TRANSLATED),
    "init: labels of 1,000 texts, MiniLM": Recipe("", 1000, 32, "accuracy", "emotion", ("model=MINILM",)),
    "minilm-emotion": Recipe("minilm-emotion.yaml", 2000, 64, "accuracy", "emotion", ("model.source=MINILM",)),
    "emotion-distilbert-scratch": Recipe("emotion-distilbert-scratch.yaml", 2000, 64, "accuracy", "emotion"),
    "multi30k-embedding": Recipe(
        "multi30k-embedding.yaml", 2000, 128, "ndcg_at_10", "multi30k", ("model.source=MINILM",)
    ),
    "tiny-shakespeare": Recipe(
        "tiny-shakespeare.yaml",
        0,
        12,
        "",
        "tinyshakespeare/input.txt",
        ("task.samples=0", "data.test_fraction=0.1"),
        500,
    ),
    "own/characters": Recipe("own/characters.yaml", 0, 64, ""),
    "own/images": Recipe("own/images.yaml", 0, 64, "accuracy"),
    "own/translation": Recipe("own/translation.yaml", 0, 50, ""),
}


def lockstep(*words: str, cwd: Path) -> str:
    """Standard output of a command. Errors: SystemExit with what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *words],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def run_file(recipe: Recipe, data: Path, minilm: Path, room: Path) -> tuple[Path, list[str]]:
    """Its run file, and the overrides that make it small."""
    keys = [key.replace("MINILM", str(minilm)) for key in recipe.keys]
    small = [f"data.limit={recipe.rows}"] if recipe.rows else []
    if recipe.file:
        source = [f"data.source={data / recipe.source}"] if recipe.source else []
        return ROOT / "runs" / recipe.file, source + small + keys
    model = [word for key in keys if key.startswith("model=") for word in ("--model", key.removeprefix("model="))]
    file = room / "run.yaml"
    lockstep("init", "--data", str(data / recipe.source), str(file), *model, "--yes", "--force", cwd=room)
    return file, small + [key for key in keys if not key.startswith("model=")]


def best(lines: list[dict[str, Any]], name: str, sign: int) -> int:
    """Step of the best validation line; of equal ones the first, as `checkpoint.best` keeps it."""
    return max(lines, key=lambda line: (sign * line[name], -line["step"]))["step"]


def measure(name: str, recipe: Recipe, times: int, data: Path, minilm: Path, room: Path) -> dict[str, Any]:
    """Train once, and score the last and the best models on the test split."""
    room.mkdir(parents=True, exist_ok=True)
    file, overrides = run_file(recipe, data, minilm, room)
    base = yaml.safe_load(file.read_text())
    overrides += [f"batch_size={recipe.batch}", "launch.processes=1", f"output={room / 'out'}", "checkpoint.best=null"]
    length = recipe.steps or base["epochs"]
    overrides.append(f"{'steps' if recipe.steps else 'epochs'}={length * times}")
    planned = json.loads(lockstep("plan", str(file), *overrides, "--json", cwd=ROOT))
    total = int(planned["facts"]["length"].split()[0].replace(",", ""))
    every = max(1, total // EVALUATIONS)
    overrides += [f"evaluate.every={every}", f"checkpoint.every={every}", "checkpoint.keep=100"]
    began = time.perf_counter()
    lockstep("train", str(file), *overrides, cwd=ROOT)
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (room / "out/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line.get("split") == "validation"]
    steps = {"last": lines[-1]["step"], "loss": best(lines, "loss", -1)}
    steps |= {"score": best(lines, recipe.score, 1)} if recipe.score else {}
    wanted = ["loss", *([recipe.score] if recipe.score else [])]
    test = {}
    for step in set(steps.values()):
        folder = str(room / "out/checkpoints" / f"step-{step:06d}")
        split = "validation" if recipe.file.startswith("own/") else "test"  # which they do not have
        scores = json.loads(lockstep("evaluate", folder, "--split", split, "--json", cwd=ROOT))["tables"]["scores"]
        test[step] = {row["name"]: row[split] for row in scores if row["name"] in wanted}
    return {
        "recipe": name,
        "epochs": None if recipe.steps else length * times,
        "times": times,
        "steps": total,
        "score": recipe.score,
        "step": steps,
        "test": {which: test[step] for which, step in steps.items()},
        "validation": [{key: line[key] for key in ("step", *wanted)} for line in lines],
        "seconds": round(seconds, 1),
    }


def table(file: Path) -> str:
    """The lines as a table of the page of results: at the last step, the best by loss and the best by score."""
    rows = ["| recipe | epochs | last: test loss, score | best by `-loss`: step, test loss, score | best by score |"]
    rows.append("|---|---|---|---|---|")

    def cell(run: dict[str, Any], which: str) -> str:
        if which not in run["step"]:
            return "-"
        step, last = run["step"][which], run["step"]["last"]
        if which != "last" and step == last:
            return "the last"
        values = ", ".join(f"{value:.3f}" for value in run["test"][which].values())
        return f"step {step:,} of {last:,}: {values}" if which != "last" else values

    for run in map(json.loads, file.read_text().splitlines()):
        epochs = f"{run['epochs']:g}" if run["epochs"] else f"{run['steps']:,} steps"
        name = f"{run['recipe']} ({run['score']})" if run["score"] else run["recipe"]
        rows.append(f"| {name} | {epochs} | {' | '.join(cell(run, which) for which in ('last', 'loss', 'score'))} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("minilm", type=Path, nargs="?")
    parser.add_argument("--room", type=Path, help="folder for runs; default: a temporary one")
    parser.add_argument("--only", nargs="*", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--times", nargs="*", type=int, default=TIMES, help="factors of a recipe's epochs")
    parser.add_argument("--table", type=Path, help="print the table of this file; nothing is trained")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    with tempfile.TemporaryDirectory() as temporary:
        for times in args.times:
            for name in args.only:
                room = (args.room or Path(temporary)).absolute() / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}-{times}"
                data, minilm = args.data.absolute(), args.minilm.absolute()
                print(json.dumps(measure(name, RECIPES[name], times, data, minilm, room)), flush=True)


if __name__ == "__main__":
    main()
