"""Steps as planned beside steps as they were: `bench --calibrate` and real jobs by turns, in the same minutes.

In: a run file, or none for a small GPT-2; strategies and numbers of ranks. Out: a Markdown table and, asked for, a file
of JSON: seconds of a step, planned from the calibration and measured by the product's own loop (medians over rounds);
bytes between steps of the rank that holds most. Status 1 where one is further apart than is allowed.
What a calibration knows of a step is one process's under `single`, and what a rank of two computes for a micro-batch
besides the model's operations under the engines of `lockstep_plan.rates`; every line is foretold from that.
Example: python benchmarks/planned.py --ranks 1 2 4 --rounds 5 --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.config.run import Run, RunError, load
from lockstep.lab import bench
from lockstep.lab.bench import Bench, BenchRow, machine
from lockstep_plan import calibrate, planner

SMALL = {
    "name": "planned",
    "data": {"source": "builtin/emotion", "max_length": 64},
    "model": {"type": "gpt2", "config": {"n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 64}},
    "tokenizer": {"train": "bpe", "vocab_size": 2000},
    "steps": 200,
    "batch_size": 128,
    "micro_batches": 8,
    "launch": {"device": "cpu", "threads": 1},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"name": "single", "options": {}},
    "allreduce": {"name": "allreduce", "options": {}},
    "ddp": {"name": "ddp", "options": {}},
    "fsdp2_step": {"name": "fsdp2", "options": {"gather": "step"}},
    "fsdp2_micro_batch": {"name": "fsdp2", "options": {"gather": "micro_batch"}},
    "pipeline": {"name": "pipeline", "options": {}},
    **{name: {"name": name, "options": {}} for name in ("zero1", "zero2", "zero3", "hf_accelerate", "hf_trainer")},
}
TIME, MEMORY = 0.15, 0.05  # largest accepted relative differences


def rows_of(base: Run, strategies: list[str], ranks: list[int]) -> list[BenchRow]:
    """Rows that can run."""
    rows = []
    for name in strategies:
        for count in ranks:
            if (name == "single" and count > 1) or (name == "pipeline" and count == 1):
                continue
            changed: dict[str, Any] = {"strategy": base.strategy.model_copy(update=STRATEGIES[name])}
            changed["launch"] = base.launch.model_copy(update={"processes": count})
            row = BenchRow(count, name, {}, base.model_copy(update=changed))
            try:
                row.job = bench.resolved(row.run)
                rows.append(row)
            except RunError as caught:
                print(f"left out: {name}, {count} ranks: {caught}", file=sys.stderr)
    return rows


def line_of(row: BenchRow, device: Any) -> dict[str, Any]:
    """Planned and measured values of a row."""
    plan = planner.plan(row.run, row.processes, device)
    found, rounds = plan.estimate, list(row.rounds.values())
    seconds = sorted(t.seconds / t.steps for t in rounds)
    held = max(rank.at_rest for t in rounds for rank in t.ranks)
    planned_held = sum(found.at.at_rest.values())
    return {
        "strategy": row.series,
        "ranks": row.processes,
        "planned_s": round(found.step_s, 4),
        "measured_s": round(median(seconds), 4),
        "lowest_s": round(seconds[0], 4),
        "highest_s": round(seconds[-1], 4),
        "apart": round(found.step_s / median(seconds) - 1, 3),
        "parts_s": {name: round(s, 4) for name, s in found.seconds.items()},
        "planned_at_rest": planned_held,
        "measured_at_rest": held,
        "at_rest_apart": round(planned_held / held - 1, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*", metavar="key=value", help="of the run file, after --")
    args = parser.parse_args()
    base = load(args.run, args.words, None if args.run else SMALL)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as room:
        base = base.model_copy(update={"output": f"{room}/out"})
        jobs = calibrate.jobs_of(base, args.ranks, Path(room) / "calibration")
        rows = rows_of(base, args.strategies, args.ranks)
        asked = Bench(base, {}, args.ranks, args.steps, 3, args.rounds, False, Path(room))
        rates = []
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
            rates.append(calibrate.measured(jobs, args.steps, lambda text: print(text, file=sys.stderr)))
            for place, row in enumerate(rows):
                bench.one(asked, row, number, Path(room) / "jobs" / str(place))
                if row.reason is not None:
                    raise SystemExit(f"{row.series}, {row.processes} ranks: {row.reason}")
        simulated = calibrate.simulated(jobs, rates, lambda text: print(text, file=sys.stderr))
        device = calibrate.device_of(jobs[1], rates, simulated)
        found = [line_of(row, device) for row in rows]
    report(args, base, device, rates, found, time.perf_counter() - began)


def report(args: argparse.Namespace, base: Run, device: Any, rates: Any, found: list[dict], took: float) -> None:
    print("| strategy | ranks | planned, s | measured, s | lowest to highest | apart | held between steps | apart |")
    print("|---|---|---|---|---|---|---|---|")
    for line in found:
        print(
            f"| `{line['strategy']}` | {line['ranks']} | {line['planned_s']:.3f} | {line['measured_s']:.3f} | "
            f"{line['lowest_s']:.3f} to {line['highest_s']:.3f} | {line['apart']:+.1%} | "
            f"{line['measured_at_rest']:,} | {line['at_rest_apart']:+.1%} |"
        )
    if args.out:
        told = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "rounds": args.rounds,
            "steps": args.steps,
            "took_s": round(took),
            "run": base.model_dump(mode="json", include=set(SMALL)),
            "device": device.model_dump(mode="json", exclude_none=True),
            "rates": [{n: asdict(each) for n, each in one.items()} for one in rates],
            "found": found,
        }
        args.out.write_text(json.dumps(told, indent=1), encoding="utf-8")
    late = [line for line in found if abs(line["apart"]) > TIME or abs(line["at_rest_apart"]) > MEMORY]
    print(f"{len(found) - len(late)} of {len(found)} within {TIME:.0%} of the time and {MEMORY:.0%} of the bytes")
    if late:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
