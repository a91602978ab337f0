"""`launch.rebalance_every` with one of two ranks at half speed, beside equal shares, in turns within one job.

In: rounds. Out: a table, and every round as JSON in --out. The second rank is slow: after each micro-batch it burns as
much processor time as the micro-batch took. Two ranks take turns on the same steps: equal shares;
`launch.rebalance_every=3`; and both again with no rank slowed. Steps in which shares have yet to move are left out
everywhere. A step takes as long as its slowest rank: `processor` is the processor time of that process, of all its
threads, which other work on the machine does not change; `wall` is the clock's. `--clock processor` has ranks measure
each other by processor time, too, for a machine on which other work slows either rank at any time.
Example: python benchmarks/hand_over.py --rounds 5 --out results.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from run import processor

from lockstep.config.run import Run, load
from lockstep.distributed import step_timer
from lockstep.distributed.world import World
from lockstep.training.data_loader import StepLoader
from lockstep.training.rebalance import LoadBalancer
from support.harness import build, run_on

JOB: dict[str, Any] = {
    "name": "hand-over",
    "model": {"type": "gpt2", "config": {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64}},
    "data": {"source": "builtin/emotion", "max_length": 64},
    "tokenizer": {"train": "bpe", "vocab_size": 400},
    "batch_size": 64,
    "micro_batches": 16,
    "steps": 1_000_000,
    "launch": {"device": "cpu", "threads": 1},
}
CASES = {
    "one slow, equal shares": (True, 0),
    "one slow, hand_over": (True, 3),
    "equal shares": (False, 0),
    "hand_over": (False, 3),
}
MOVING, STEPS = 8, 4  # steps that are left out of each stretch, and those that are counted


def halved(strategy: Any) -> dict[str, bool]:
    """Strategy whose micro-batches take twice as long while the answer's `now` is true."""
    plain, slow = strategy.run_micro_batch, {"now": False}

    def run_micro_batch(micro: Any, divisor: float) -> Any:
        began = time.thread_time()
        loss = plain(micro, divisor)
        if slow["now"]:
            with strategy.phases("forward"):
                until = 2 * time.thread_time() - began
                while time.thread_time() < until:
                    pass
        return loss

    strategy.run_micro_batch = run_micro_batch
    return slow


def measured(world: World, run: Run, rounds: int, clock: str) -> list[dict[str, Any]]:
    """Seconds per step and shares of each round, on one rank."""
    task, strategy = build(run, world)
    if clock == "processor":
        step_timer.time = SimpleNamespace(perf_counter=time.thread_time)  # type: ignore[assignment]
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    slow, found = halved(strategy), []
    for number in range(rounds):
        found.append({})
        for name, (one_slow, every) in CASES.items():
            shares: list[list[int]] = []
            launch = run.launch.model_copy(update={"rebalance_every": every})
            session: Any = SimpleNamespace(
                run=run.model_copy(update={"launch": launch}),
                world=world,
                feed=feed,
                strategy=strategy,
                journal=SimpleNamespace(event=lambda n, s, to=shares, **facts: to.append(facts["micro_batches"])),
                checkpoints=SimpleNamespace(say=lambda text: None),
            )
            slow["now"] = one_slow and world.rank == 1
            taken = []
            for batch in LoadBalancer(session).steps(number * (MOVING + STEPS), lambda caught: None):
                began = time.process_time(), time.perf_counter()
                strategy.train_step(batch, 1e-4)
                taken.append((time.process_time() - began[0], time.perf_counter() - began[1]))
                if len(taken) == MOVING + STEPS:
                    break
            cpu, wall = ([each[i] for each in taken[MOVING:]] for i in (0, 1))
            found[-1][name] = {"processor": cpu, "wall": wall, "shares": shares}
    strategy.close()
    return found


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--rounds", type=int, default=5)
    own.add_argument("--strategy", default="ddp")
    own.add_argument("--clock", choices=["wall", "processor"], default="wall")
    own.add_argument("--out", type=Path)
    args = own.parse_args()
    run = load(None, [f"strategy.name={args.strategy}"], JOB)
    ranks = run_on(2, measured, run, args.rounds, args.clock, run=run, timeout_s=3000)
    print("| | processor ms a step, slowest rank | wall ms a step | times as fast, processor | wall | shares |")
    print("|---|---|---|---|---|---|")
    rounds: list[dict[str, Any]] = []
    for both in zip(*ranks, strict=True):
        of_round = {}
        for name in CASES:
            steps = [max(pair) for pair in zip(*(rank[name]["processor"] for rank in both), strict=True)]
            of_round[name] = {
                "processor": statistics.median(steps),
                "wall": statistics.median(both[0][name]["wall"]),
                "shares": both[0][name]["shares"],
            }
        rounds.append(of_round)
    for name, (one_slow, _) in CASES.items():
        base = "one slow, equal shares" if one_slow else "equal shares"
        cells = [f"{statistics.median(r[name][kind] for r in rounds) * 1e3:.0f}" for kind in ("processor", "wall")]
        for kind in ("processor", "wall"):
            ratios = [r[base][kind] / r[name][kind] for r in rounds]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        ends = [r[name]["shares"][-1:] or [[8, 8]] for r in rounds]
        print(f"| {name} | {' | '.join(cells)} | {', '.join(str(end[0]) for end in ends)} |")
    if args.out:
        saved = {"processor": processor(), "date": str(date.today()), "load": os.getloadavg(), "arguments": sys.argv}
        args.out.write_text(json.dumps(saved | {"rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
