"""lockstep beside its peers on the same job: interleaved, in the same run, medians and ratios in one table.

In: jsonl data, a model folder or a GPT-2 config. Out: a Markdown table on the terminal, and every run as JSON in --out.
Example: python benchmarks/run.py --model MINILM --train train.jsonl --validation validation.jsonl --out results.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent / "peers"
CONTENDERS = {
    "lockstep": ["lockstep_train.py"],
    "lockstep, by length": ["lockstep_train.py", "--group", "50"],  # as Trainer's group_by_length: 50 batches at once
    "lockstep, inexact": ["lockstep_train.py", "--inexact"],
    "lockstep, allreduce": ["lockstep_train.py", "--strategy", "allreduce"],
    "lockstep, hf_trainer": ["lockstep_train.py", "--strategy", "hf_trainer"],
    "lockstep, hf_accelerate": ["lockstep_train.py", "--strategy", "hf_accelerate"],
    "HF Trainer as it comes": ["trainer.py"],
    "HF Trainer tuned": ["trainer_tuned.py"],
    "Accelerate loop": ["accelerate_loop.py"],
    "Lightning": ["lightning_fit.py"],
}


def one(contender: str, processes: int, precision: str, common: list[str], micro_batches: int) -> dict:
    """One run of one contender, as a process (or several, under torchrun) of its own."""
    script, *extra = CONTENDERS[contender]
    extra = [*extra, "--micro-batches", str(micro_batches)] if script == "lockstep_train.py" else extra
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [
            sys.executable,
            *start,
            str(HERE / script),
            *common,
            *extra,
            "--precision",
            precision,
            "--json",
            out.name,
        ]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode != 0:
            raise SystemExit(f"{contender} failed:\n{done.stderr[-3000:]}")
        return json.loads(Path(out.name).read_text())


def processor() -> str:
    """The processor's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()


def table(runs: list[dict], baseline: str) -> str:
    """Medians by contender; ratios are medians of the ratios within a round."""
    columns = ["processes", "precision", "", "examples/s", f"x {baseline}", "CPU ms/example", "first step s"]
    columns += ["peak MiB", "padding", "accuracy"]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for key in sorted({(r["processes"], r["precision"]) for r in runs}, key=str):
        for name in CONTENDERS:
            mine = [r for r in runs if (r["processes"], r["precision"]) == key and r["contender"] == name]
            if not mine:
                continue
            ratios = [
                r["examples_per_s"] / b["examples_per_s"]
                for r in mine
                for b in runs
                if b["contender"] == baseline and (b["processes"], b["precision"], b["round"]) == (*key, r["round"])
            ]
            middle = {k: statistics.median(r[k] for r in mine) for k in mine[0] if isinstance(mine[0][k], int | float)}
            accuracy = f"{middle['accuracy']:.4f}" if "accuracy" in middle else "-"
            ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
            rows.append(
                f"| {key[0]} | {key[1]} | {name} | {middle['examples_per_s']:.1f} | {ratio} "
                f"| {middle['cpu_s_per_example'] * 1e3:.2f} | {middle['time_to_first_step_s']:.1f} "
                f"| {middle['peak_memory_bytes'] / 2**20:.0f} | {middle['padding_ratio']:.2f} | {accuracy} |"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--baseline", default="HF Trainer as it comes")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", action="store_true", help="print the table of what --out already holds")
    own, common = parser.parse_known_args()
    if own.show:
        saved = json.loads(own.out.read_text())
        print(f"{saved['hardware']}\n\n{table(saved['runs'], own.baseline)}")
        return
    hardware = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "arguments": [Path(a).name if "/" in a else a for a in common],
    }
    runs: list[dict] = []
    for number in range(own.rounds):
        for processes in own.processes:
            for precision in own.precisions:
                for contender in own.contenders:  # interleaved: a slow minute of the machine meets all of them
                    found = one(contender, processes, precision, common, own.micro_batches)
                    runs.append({"contender": contender, "processes": processes, "round": number, **found})
                    own.out.write_text(json.dumps({"hardware": hardware, "runs": runs}, indent=1))
                    print(
                        f"round {number}: {processes} x {precision} {contender}: {found['examples_per_s']:.1f}/s",
                        flush=True,
                    )
    print(f"\n{hardware['processor']}, {hardware['cores']} cores; {runs[0]['versions']}\n\n{table(runs, own.baseline)}")


if __name__ == "__main__":
    main()
