"""From kill -9 to the next step: seconds until a job trains again, beside a cold start of its bare imports.

In: rounds. Out: a table of medians, and every round as JSON in --out. Each round: a rank that is killed under
`max_restarts`, until the next step; all processes killed, and the same command, until the next step; a fresh process
that only imports what a rank imports. They take turns on the same job of two processes.
Example: python benchmarks/restart.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from run import processor

from support.command import LOCKSTEP, lines, processes_in, ranks_of, saved, start, until, write

IMPORTS = (
    "import torch, transformers, transformers.modeling_utils, datasets, tokenizers, safetensors.torch, pydantic, rich"
)


def until_next_step(folder: Path, process: subprocess.Popen[str], began: float) -> float:
    """Seconds from `began` to the first step after the next `start` event."""
    events = folder / "out" / "events.jsonl"
    count = events.read_text().count('"start"')
    until(lambda: events.read_text().count('"start"') > count, "the start", process)
    at = json.loads([line for line in events.read_text().splitlines() if '"start"' in line][-1])
    until(lambda: any(line["step"] > at["step"] for line in lines(folder)[-1:]), "a step", process)
    return time.time() - began


def stages(folder: Path, began: float, seconds: float) -> dict[str, float]:
    """Split the time of a command into stages by its time stamps."""
    started = json.loads((folder / "out" / "launch.json").read_text())["began"]
    events = [json.loads(line) for line in (folder / "out" / "events.jsonl").read_text().splitlines()]
    ready = [event["time"] for event in events if event["event"] == "start"][-1]
    return {
        "launcher: Python, imports, checks, tokens from the cache": started - began,
        "ranks: fork, rendezvous, model, dry run, loading the checkpoint": ready - started,
        "first step": began + seconds - ready,
    }


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--rounds", type=int, default=5)
    own.add_argument("--out", type=Path)
    args = own.parse_args()
    found: dict[str, list[float]] = {"bare imports": [], "a rank, restarted": [], "all, the same command": []}
    where: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as place:
        folder, cache, dice = Path(place).resolve() / "job", Path(place) / "cache", random.Random(0)
        write(folder, steps=1_000_000, evaluate={"every": 0}, optim={"schedule": "constant"})
        began = time.time()
        process = start([*LOCKSTEP, "train", "run.yaml", "launch.max_restarts=1000"], folder, cache)
        for number in range(args.rounds + 1):
            before = saved(folder)
            until(lambda b=before: saved(folder) > b, "a checkpoint", process)  # type: ignore[misc]
            began = time.time()
            os.kill(dice.choice(ranks_of(process, folder)), signal.SIGKILL)
            rank = until_next_step(folder, process, began)
            for pid in [process.pid, *processes_in(folder)]:
                os.kill(pid, signal.SIGKILL)
            process.communicate()
            until(lambda: not processes_in(folder), "the ranks to end")
            began = time.time()
            process = start([*LOCKSTEP, "train", "run.yaml", "launch.max_restarts=1000"], folder, cache)
            everything = until_next_step(folder, process, began)
            stage = stages(folder, began, everything)
            began = time.time()
            for pid in processes_in(folder):  # nothing else may run while imports are timed
                os.kill(pid, signal.SIGSTOP)
            began = time.time()
            subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            imports = time.time() - began
            for pid in processes_in(folder):
                os.kill(pid, signal.SIGCONT)
            if number:  # the first round warms up the caches
                found["bare imports"].append(imports)
                found["a rank, restarted"].append(rank)
                found["all, the same command"].append(everything)
                where.append(stage)
        for pid in [process.pid, *processes_in(folder)]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    medians = {name: statistics.median(values) for name, values in found.items()}
    print("| from kill -9 to the next step | seconds | x bare imports |\n|---|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value:.2f} | {value / medians['bare imports']:.2f} |")
    for name in where[0]:
        print(f"| of the same command: {name} | {statistics.median(stage[name] for stage in where):.2f} | |")
    if args.out:
        args.out.write_text(json.dumps({"processor": processor(), "rounds": found, "stages": where}, indent=1))


if __name__ == "__main__":
    main()
