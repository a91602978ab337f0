"""How close a step comes to the processor's matrix-product peak, in process CPU time at one thread.

In: jsonl data and a model folder. Out: a Markdown table: the peak, a bare loop on batches without padding (128 x 24
tokens), and lockstep's own step on the real data, each as useful FLOP/s and as a share of the peak.
Useful FLOPs: 6 x weights of the encoder's matrices x real tokens (2 forward, 4 backward); padding counts for nothing.
Example: python benchmarks/limit.py --model MINILM --train train.jsonl --validation validation.jsonl
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lockstep.config import plugins
from lockstep.config.run import load
from lockstep.config.schedules import learning_rate
from lockstep.data.job import Job
from lockstep.distributed.system_metrics import keep_freed_memory
from lockstep.distributed.world import World
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader


def median_time(call: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def peak(dtype: torch.dtype) -> float:
    """FLOP/s of a 3072 x 384 x 1536 product, MiniLM's largest, into preallocated memory."""
    a, b = torch.randn(3072, 384).to(dtype), torch.randn(384, 1536).to(dtype)
    out = a @ b
    for _ in range(5):
        torch.mm(a, b, out=out)
    return 2 * 3072 * 384 * 1536 / median_time(lambda: torch.mm(a, b, out=out), 60)


def matrix_weights(model: nn.Module) -> int:
    """Number of weights that multiply every token."""
    return sum(m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and "encoder" in n)


def bare(model: nn.Module, bf16: bool, steps: int) -> float:
    """Useful FLOP/s of the simplest loop on 128 x 24 tokens without padding."""
    ids = torch.randint(1000, 30000, (128, 24))
    labels = torch.randint(0, 6, (128,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, bf16):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        nn.functional.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return 6 * matrix_weights(model) * ids.numel() / median_time(step, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--validation", required=True)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="where lockstep's step spends its time, by operator")
    args = parser.parse_args()
    keep_freed_memory()  # as in training; the bare loop does it, too
    print("| precision | peak GFLOP/s | bare loop | share | lockstep | share | padding |\n" + "|---" * 7 + "|")
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with tempfile.TemporaryDirectory() as folder:
            values = {
                "output": folder,
                "data": {"train": args.train, "validation": args.validation},
                "model": {"source": args.model},
                "batch_size": args.batch_size,
                "micro_batches": args.micro_batches,
                "precision": precision,
                "strategy": {"name": "single"},
                "launch": {"device": "cpu", "threads": 1},
            }
            run = load(None, [], values)
            world = World(run).join()
            task = make_task(Job.of(run).with_data())
            strategy = plugins.find("strategies", "single")(Job.of(run, world.size), world)
            strategy.build(task)
            feed = StepLoader(task, strategy.own_micro_batches(), world.device)
            batches = [feed.make(t) for t in range(args.steps + 2)]
            weights = matrix_weights(strategy.model)
            rate = learning_rate(run.optim, 10, 100)
            top, loop = peak(dtype), bare(task.model().train(), precision == "bf16", args.steps)
            rates = []
            for batch in batches:
                seconds = median_time(partial(strategy.train_step, batch, rate), 1)
                rates.append(6 * weights * batch.tokens / seconds)
            own = statistics.median(rates[2:])
            padding = sum(b.padded for b in batches) / sum(b.tokens for b in batches)
            cells = [top / 1e9, loop / 1e9, loop / top, own / 1e9, own / top, padding]
            print(f"| {precision} | " + " | ".join(f"{c:.3g}" for c in cells) + " |", flush=True)
            if args.profile:
                with torch.profiler.profile() as profile:
                    strategy.train_step(batches[-1], rate)
                print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))


if __name__ == "__main__":
    main()
