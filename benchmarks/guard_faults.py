"""Injected faults against what `guard` finds: bits flipped in activations, gradients, sums, weights, at a known rate.

In: how many steps, and how many ranks. Out: for each kind of fault how many were injected, in how many steps `guard`
could have seen one (the micro-batch was the one that it draws; the weights stood before a guarded step), in how many it
did, and alarms where nothing was injected. JSON, a line a kind.

python benchmarks/guard_faults.py --steps 400 --ranks 1
python benchmarks/guard_faults.py --steps 200 --ranks 3
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep.config.run import Run, load
from lockstep.data.job import Job, strategy_class
from lockstep.distributed.world import World
from lockstep.strategies.exact.gradient_sum import share
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader
from lockstep.training.errors import CorruptionDetected
from lockstep.training.sdc_check import SdcCheck, drawn

KINDS = ("nothing", "activations", "gradients", "messages", "weights")
RATE = 0.5  # share of steps with a fault
SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"source": "builtin/emotion", "max_length": 32, "limit": 100},
    "model": {"type": "gpt2", "config": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}},
    "tokenizer": {"train": "bpe", "vocab_size": 400},
    "epochs": 1000,
    "batch_size": 25,  # of 100 examples: no short step, and no empty micro-batch
    "micro_batches": 8,
    "launch": {"device": "cpu", "threads": 1},
    "sdc_check": {"every": 1},
}


def flipped(tensor: Tensor, draw: random.Random) -> Tensor:
    """Flip one of the upper seven mantissa bits of one number."""
    changed = tensor.detach().clone().contiguous()
    numbers = changed.view(-1).nonzero().view(-1)  # a flipped bit of a zero is lost in the next sum
    changed.view(-1).view(torch.int32)[numbers[draw.randrange(len(numbers))]] ^= 1 << draw.randrange(16, 23)
    return changed


class Injected:
    """Faults of one kind: for each step, whether there is one, its rank and its micro-batch."""

    def __init__(self, kind: str, run: Run, world: World, strategy: Any) -> None:
        self.kind, self.run, self.world, self.strategy = kind, run, world, strategy
        self.now: tuple[int, random.Random] | None = None  # micro-batch on the faulty rank
        self.changed = False
        self._under_way = -1
        if kind == "activations":
            strategy.model.transformer.h[0].mlp.register_forward_hook(self._activation)
        if kind == "gradients":
            strategy.weights.named["transformer.h.1.mlp.c_fc.weight"].register_hook(self._gradient)
        plain: Callable[..., Tensor] = strategy.run_micro_batch

        def run_micro_batch(micro: Any, divisor: float) -> Tensor:
            self._under_way = micro.index
            try:
                return plain(micro, divisor)
            finally:
                self._under_way = -1

        strategy.run_micro_batch = run_micro_batch
        received = strategy.reduce
        if kind == "messages":  # one rank gets another sum
            strategy.reduce = lambda: self._message(received())

    def plan(self, step: int) -> tuple[int, int] | None:
        """Rank and micro-batch of a step's fault, or None. Equal on all ranks."""
        draw = random.Random(f"{self.kind} {step}")
        if self.kind == "nothing" or draw.random() > RATE:
            return None
        micro_batch = draw.randrange(self.run.micro_batches)
        size = self.world.size
        return next(r for r in range(size) if micro_batch in share(self.run.micro_batches, r, size)), micro_batch

    def arm(self, step: int) -> None:
        """Inject before a step: into the step, or into its initial weights."""
        found = self.plan(step)
        mine = found is not None and found[0] == self.world.rank
        draw = random.Random(step)
        self.now = (found[1], draw) if found is not None and mine else None
        if self.kind == "weights" and mine:
            with torch.no_grad():
                weight = draw.choice([p for p in self.strategy.parameters if p.any()])
                weight.copy_(flipped(weight, draw))

    def _activation(self, module: Any, given: Any, output: Tensor) -> Tensor:
        if self.now is None or self.now[0] != self._under_way:
            return output
        return output + (flipped(output, self.now[1]) - output).detach()

    def _gradient(self, gradient: Tensor) -> Tensor:
        if self.now is None or self.now[0] != self._under_way:
            return gradient
        return flipped(gradient, self.now[1])

    def _message(self, sums: list[Tensor]) -> list[Tensor]:
        if self.now is None:
            return sums
        place = self.now[1].choice([i for i, each in enumerate(sums) if each.any()])
        return [flipped(each, self.now[1]) if i == place else each for i, each in enumerate(sums)]


def rank_of(rank: int, ranks: int, meet: str, kind: str, steps: int, results: Any) -> None:
    """Run one rank's steps. Rank 0 reports the results."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)})
    os.environ.update({"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    run = load(None, [f"strategy.name={'single' if ranks == 1 else 'allreduce'}"], SMALL)
    world = World(run, meet)
    world.join()
    task, strategy = make_task(Job.of(run).with_data()), strategy_class(run)(Job.of(run, world.size), world)
    strategy.build(task)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    session: Any = SimpleNamespace(run=run, job=strategy.job, world=world, feed=feed, strategy=strategy)
    guard, injected = SdcCheck(session), Injected(kind, run, world, strategy)
    counts = dict.fromkeys(("injected", "could_be_seen", "found", "named_rightly", "false_alarms"), 0)
    for step in range(steps):
        injected.arm(step)
        # a wrongly received sum changes the weights at the start of the next step
        fault = injected.plan(step - 1 if kind == "messages" else step) if step or kind != "messages" else None
        counts["injected"] += fault is not None
        sampled = fault is not None and (kind in ("weights", "messages") or fault[1] == drawn(session.job, step))
        counts["could_be_seen"] += sampled
        try:
            guard.train_step(feed.make(step), 1e-3)
        except CorruptionDetected as caught:
            wrong = (
                f"says that rank {fault[0]} on" if caught.sound and fault else f"those of rank {(fault or [0])[0]} on"
            )
            counts["found"] += sampled
            counts["named_rightly"] += wrong in str(caught)
            counts["false_alarms"] += not sampled
            if not caught.sound and fault is not None:
                level(world, strategy, (fault[0] + 1) % ranks)
                guard.train_step(feed.make(step), 1e-3)
    if world.is_main:
        results.put(counts)
    strategy.close()
    world.close()


def level(world: World, strategy: Any, sound: int) -> None:
    """Give all ranks the weights and moments of one of them. Collective."""
    with torch.no_grad():
        for weight in strategy.parameters:
            for tensor in (weight, *strategy.update.optimizer.state[weight].values()):
                tensor.copy_(world.all_gather(tensor.detach().clone())[sound])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    # one rank alone cannot compare its weights
    for kind in [kind for kind in args.kinds if args.ranks > 1 or kind in KINDS[:3]]:
        with tempfile.TemporaryDirectory() as folder:
            results = context.Queue()
            given = [
                (r, args.ranks, f"file://{Path(folder) / 'meet'}", kind, args.steps, results) for r in range(args.ranks)
            ]
            ranks = [context.Process(target=rank_of, args=each) for each in given]
            for process in ranks:
                process.start()
            counts = results.get(timeout=3000)
            for process in ranks:
                process.join()
        print(json.dumps({"kind": kind, "ranks": args.ranks, "steps": args.steps, **counts}), flush=True)


if __name__ == "__main__":
    main()
