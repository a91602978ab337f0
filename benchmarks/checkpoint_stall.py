"""What a checkpoint costs training: seconds that a step waits, written beside training against waited for.

In: sizes of models, steps between checkpoints. Out: a table of medians and ratios, and JSON in --out.
The three arms (no checkpoint, waited for, beside training) take turns on the same model in the same processes.
Example: python benchmarks/checkpoint_stall.py --every 50 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from run import processor

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config.run import QUICK_START, Run, load
from lockstep.distributed.world import World
from lockstep.training.data_loader import StepLoader
from support.harness import build, run_on
from support.saving import job_of

MODELS = {  # about 22 and 122 million parameters
    "minilm": [
        "model.type=bert",
        "model.config={hidden_size: 384, num_hidden_layers: 12, num_attention_heads: 12, intermediate_size: 1536}",
    ],
    "500mb": ["model.type=gpt2", "model.config={n_layer: 17, n_head: 12, n_embd: 768}"],
}
ARMS = ("none", "waited for", "beside training")


def times_of(world: World, run: Run, every: int, rounds: int) -> dict:
    """Seconds of each arm's steps and the waiting part of them, on this rank."""
    task, strategy = build(run, world)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    checkpoints = Checkpoints(job_of(run), world, 10**6)
    batch, step = feed.make(0).to(world.device), 0
    found: dict = {arm: {"seconds": [], "stalls": []} for arm in ARMS}

    def train(arm: str) -> None:
        nonlocal step
        world.barrier()
        start, stalled = time.perf_counter(), 0.0
        for i in range(every):
            float(strategy.train_step(batch, 1e-5).loss)
            step += 1
            before = time.perf_counter()
            checkpoints.advance()
            if i == 0 and arm != "none":
                checkpoints.save(step, strategy.state)
                if arm == "waited for":
                    checkpoints.settle()
            stalled += time.perf_counter() - before
        before = time.perf_counter()
        checkpoints.settle()  # whatever was not written within `every` steps
        stalled += time.perf_counter() - before
        found[arm]["seconds"].append(time.perf_counter() - start)
        found[arm]["stalls"].append(stalled)

    for arm in ARMS:
        train(arm)  # the first save allocates the copy
    first = {arm: times["stalls"].pop() for arm, times in found.items() if times["seconds"].pop()}
    for i in range(rounds):
        for arm in ARMS[i % 3 :] + ARMS[: i % 3]:
            train(arm)
    size = sum(p.stat().st_size for p in (checkpoints.folder / "latest").resolve().iterdir())
    strategy.close()
    return {"arms": found, "first": first, "bytes": size}


def measure(name: str, every: int, rounds: int, processes: int, folder: str) -> dict:
    strategy = "single" if processes == 1 else "ddp"
    run = load(
        None,
        [
            *MODELS[name],
            f"output={folder}/{name}",
            f"strategy.name={strategy}",
            *("batch_size=4", "micro_batches=4", "data.max_length=32"),
            *("checkpoint.keep=1", "launch.threads=1", "launch.device=cpu"),
        ],
        QUICK_START,
    )
    ranks = run_on(processes, times_of, run, every, rounds, run=run, timeout_s=3600)
    found = {"model": name, "every": every, "processes": processes, "bytes": ranks[0]["bytes"], "ranks": ranks}
    for arm in ARMS:
        for kind in ("seconds", "stalls"):
            slowest = [max(values) for values in zip(*(rank["arms"][arm][kind] for rank in ranks), strict=True)]
            found[f"{kind}, {arm}"] = statistics.median(slowest)
    found["stall ratio"] = found["stalls, beside training"] / found["stalls, waited for"]
    return found


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    own.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    own.add_argument("--rounds", type=int, default=5)
    own.add_argument("--processes", type=int, default=1)
    own.add_argument("--folder", help="disk to write to; default: the temporary folder")
    own.add_argument("--out", type=Path)
    args = own.parse_args()
    results = []
    print(
        "| model | on disk | waited for | beside training | ratio | step-time overhead, waited for | beside training |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in args.models:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            found = measure(name, args.every, args.rounds, args.processes, folder)
        results.append(found)
        none = found["seconds, none"]
        over = [f"{found[f'seconds, {arm}'] / none - 1:+.1%}" for arm in ARMS[1:]]
        stalls = [f"{found[f'stalls, {arm}']:.3f} s" for arm in ARMS[1:]]
        cells = [name, f"{found['bytes'] / 1e6:.0f} MB", *stalls, f"{found['stall ratio']:.1%}", *over]
        print(f"| {' | '.join(cells)} |", flush=True)
    if args.out:
        facts = {"processor": processor(), "torch": torch.__version__, "load": os.getloadavg()}
        args.out.write_text(json.dumps(facts | {"results": results}, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
