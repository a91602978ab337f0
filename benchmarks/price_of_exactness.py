"""The price of the same bits: steps of each strategy with `strategy.exact` beside those of its own inexact form.

In: strategies, a precision, rounds. Out: a line of JSON for each job in --out, and a Markdown table of it with --table.
A job is two new processes of one thread each, forked from one that has imported everything, which train a BERT of
MiniLM's size (22.7M numbers, weights at random) on the built-in texts. Jobs of a round follow each other, so that the
two forms of a strategy meet the same load; ratios are of one round, and the table has their median and spread. With
--portable the forms are `exact: portable` and `exact: true` of `single`: two processes, started anew each because
libraries look at variables when they are loaded, take turns step by step, and the table has quartiles over such pairs.
Example: python benchmarks/price_of_exactness.py --rounds 5 --out price.jsonl; then the same with --table
python benchmarks/price_of_exactness.py --portable --precisions fp32 bf16 --rounds 40 --out portable.jsonl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["HF_HUB_OFFLINE"] = "1"

import transformers  # noqa: F401 - the processes are forked with it

from lockstep.config.run import Run, load
from lockstep.data.job import Job, strategy_class
from lockstep.distributed.world import World
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader

MODEL = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
MODEL |= {"vocab_size": 30522}
OPTIONS: dict[str, Mapping[str, Any]] = {"fsdp2": {"gather": "micro_batch"}}


def run_of(name: str, exact: bool | str, precision: str, args: argparse.Namespace, threads: int = 1) -> Run:
    """Build a job."""
    values = {
        "task": {"name": "classification", "text": "text", "label": "label"},
        "data": {"source": "builtin/emotion", "max_length": 64},
        "model": {"type": "bert", "config": MODEL},
        "tokenizer": {"train": "wordpiece", "vocab_size": 1000},
        "steps": args.steps + 2,
        "batch_size": args.batch_size,
        "micro_batches": 8,
        "precision": precision,
        "optim": {"learning_rate": 1e-4},
        "strategy": {"name": name, "exact": exact, "options": dict(OPTIONS.get(name, {}))},
        "launch": {"device": "cpu", "threads": threads},
    }
    return load(None, [], values)


def memory(name: str) -> int:
    """Memory of this process in bytes: `VmRSS`, or its peak `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def built(rank: int, ranks: int, meet: str, run: Run) -> tuple[Any, StepLoader, int]:
    """Build a strategy after one warm-up step; returns it with its loader and the process's bytes before."""
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    world = World(run, meet)
    world.join()
    task = make_task(Job.of(run).with_data())
    before = memory("VmRSS")
    strategy: Any = strategy_class(run)(Job.of(run, world.size), world)
    strategy.build(task)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    strategy.train_step(feed.make(0), 1e-4)
    return strategy, feed, before


def rank_main(rank: int, ranks: int, meet: str, run: Run, steps: int, results: Any) -> None:
    """Run one rank of a job, with `steps` timed steps."""
    strategy, feed, before = built(rank, ranks, meet, run)
    clock, processor = time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        strategy.train_step(feed.make(step), 1e-4)
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    held = {"seconds": clock / steps, "processor": processor / steps, "peak": memory("VmHWM") - before}
    results.put((rank, held | {"parameters": strategy.weights.parameter_count}))


def job(run: Run, ranks: int, steps: int) -> dict[str, Any]:
    """Seconds of the slowest rank, mean CPU seconds, and highest peak memory."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, ranks, f"file://{folder}/meet", run, steps, results) for rank in range(ranks)]
        processes = [context.Process(target=rank_main, args=each) for each in arguments]
        for process in processes:
            process.start()
        held = [results.get(timeout=600)[1] for _ in processes]
        for process in processes:
            process.join()
    return {
        "seconds": max(each["seconds"] for each in held),
        "processor": statistics.mean(each["processor"] for each in held),
        "peak": max(each["peak"] for each in held),
        "parameters": held[0]["parameters"],
    }


def turns_main(meet: str, run: Run, turns: Any) -> None:
    """Run in its own process: make the requested step, and answer with its seconds."""
    strategy, feed, _ = built(0, 1, meet, run)
    turns.send("ready")
    while (step := turns.recv()) is not None:
        batch = feed.make(step)
        clock, processor = time.perf_counter(), time.process_time()
        strategy.train_step(batch, 1e-4)
        turns.send({"seconds": time.perf_counter() - clock, "processor": time.process_time() - processor})


def portable_pairs(precision: str, threads: int, args: argparse.Namespace) -> None:
    """Alternate steps of `exact: true` and `exact: portable`: one line per pair."""
    context, ends, processes = multiprocessing.get_context("spawn"), {}, []
    with tempfile.TemporaryDirectory() as folder:
        for form in (True, "portable"):
            run = run_of("single", form, precision, args, threads)  # sets this form's variables, which it inherits
            ends[form], other = context.Pipe()
            processes.append(context.Process(target=turns_main, args=(f"file://{folder}/{form}", run, other)))
            processes[-1].start()
            ends[form].recv()
        for number in range(args.rounds):
            line: dict[str, Any] = {"precision": precision, "threads": threads, "pair": number}
            for form in (True, "portable") if number % 2 else ("portable", True):
                ends[form].send(1 + number % args.steps)
                line["portable" if form == "portable" else "exact"] = ends[form].recv()
            print(line, flush=True)
            with args.out.open("a") as out:
                out.write(json.dumps(line | {"batch_size": args.batch_size}) + "\n")
        for form in ends:
            ends[form].send(None)
        for process in processes:
            process.join()


def portable_table(lines: list[dict[str, Any]]) -> str:
    """Format as Markdown: seconds per step of `exact: portable` relative to `exact: true`."""
    rows = ["| precision | threads | pairs | by processor time | by the clock |", "|---|---|---|---|---|"]
    for precision, threads in dict.fromkeys((x["precision"], x["threads"]) for x in lines):
        pairs = [x for x in lines if (x["precision"], x["threads"]) == (precision, threads)]
        told = []
        for key in ("processor", "seconds"):
            low, middle, high = statistics.quantiles((x["portable"][key] / x["exact"][key] for x in pairs), n=4)
            told.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        rows.append(f"| {precision} | {threads} | {len(pairs)} | {' | '.join(told)} |")
    return "\n".join(rows)


def table(lines: list[dict[str, Any]]) -> str:
    """Format as Markdown: each strategy's exact form relative to its inexact one, round by round."""
    rows = ["| strategy | precision | rounds | speed by the clock | by processor time | peak MiB a rank, exact | not |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name, precision in dict.fromkeys((x["strategy"], x["precision"]) for x in lines):
        ours = [x for x in lines if (x["strategy"], x["precision"]) == (name, precision)]
        rounds = {x["round"]: {y["exact"]: y for y in ours if y["round"] == x["round"]} for x in ours}
        pairs = [each for each in rounds.values() if len(each) == 2]
        if not pairs:
            continue
        told = []
        for key in ("seconds", "processor"):
            ratios = sorted(each[False][key] / each[True][key] for each in pairs)
            told.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        peaks = [f"{statistics.median(each[exact]['peak'] for each in pairs) / 2**20:,.0f}" for exact in (True, False)]
        rows.append(f"| `{name}` | {precision} | {len(pairs)} | {' | '.join([*told, *peaks])} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=["zero1", "zero2", "zero3"])
    parser.add_argument("--precisions", nargs="+", default=["fp32"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="that are timed")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--portable", action="store_true", help="`exact: portable` beside `exact: true`")
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="of each process, with --portable")
    parser.add_argument("--out", type=Path, default=Path("price.jsonl"))
    parser.add_argument("--table", action="store_true", help="only print what is in --out")
    args = parser.parse_args()
    if args.table:
        lines = [json.loads(line) for line in args.out.read_text().splitlines()]
        print(portable_table(lines) if args.portable else table(lines))
        return
    if args.portable:
        for precision in args.precisions:
            for threads in args.threads:
                portable_pairs(precision, threads, args)
        return
    kinds = [(name, precision) for precision in args.precisions for name in args.strategies]
    for number in range(args.rounds):
        for name, precision in kinds:
            for exact in (True, False) if number % 2 else (False, True):
                held = job(run_of(name, exact, precision, args), args.processes, args.steps)
                line = {"strategy": name, "precision": precision, "exact": exact, "round": number, **held}
                line |= {"processes": args.processes, "batch_size": args.batch_size, "steps": args.steps}
                print(line, flush=True)
                with args.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
