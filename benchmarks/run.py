"""lockstep beside its peers on the same job: interleaved, in the same run, medians and ratios in one table.

In: jsonl data, a model folder or a GPT-2 config. Out: a Markdown table on the terminal and beside --out, and every run
as JSON in --out. Every contender is checked to be what it says (peers/checks.py). One thread a process.

Whole epochs of the first 2,048 examples, each contender once and then again while 25 minutes are not over:
python benchmarks/run.py --model MINILM --train train.jsonl --validation validation.jsonl --learning-rate 4e-4 \\
    --warmup-steps 2 --epochs 1 --limit 2048 --rounds 9 --minutes 25 --out results.json
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
from itertools import islice
from pathlib import Path

import torch

HERE = Path(__file__).parent / "peers"
LOCKSTEP, TRAINER, ACCELERATE = "lockstep_train.py", "trainer_rebalanced.py", "accelerate_loop.py"
CONTENDERS = {
    "lockstep": [LOCKSTEP],
    "lockstep, 4 micro-batches": [LOCKSTEP, "--micro-batches", "4"],
    "lockstep, 1 micro-batch": [LOCKSTEP, "--micro-batches", "1"],
    "lockstep, 1 micro-batch, by length": [LOCKSTEP, "--group", "50", "--micro-batches", "1"],
    "lockstep, by length": [LOCKSTEP, "--group", "50", "--micro-batches", "4"],  # sorts within 50 batches
    "lockstep, inexact": [LOCKSTEP, "--inexact"],
    "lockstep, allreduce": [LOCKSTEP, "--strategy", "allreduce"],
    "lockstep, hf_trainer": [LOCKSTEP, "--strategy", "hf_trainer"],
    "lockstep, hf_accelerate": [LOCKSTEP, "--strategy", "hf_accelerate"],
    "HF Trainer as it comes": ["trainer.py"],
    "HF Trainer tuned": ["trainer_tuned.py"],
    "HF Trainer rebalanced": [TRAINER],
    "HF Trainer rebalanced, 4 groups": [TRAINER, "--groups", "4"],
    "Accelerate loop": [ACCELERATE],
    "Accelerate loop, by length": [ACCELERATE, "--by-length"],
    "Lightning": ["lightning_fit.py"],
}
ASKED = [
    "lockstep",
    "lockstep, by length",
    "HF Trainer as it comes",
    "HF Trainer tuned",
    "HF Trainer rebalanced",
    "HF Trainer rebalanced, 4 groups",
    "Accelerate loop, by length",
]
UNTUNED = ("HF Trainer as it comes", "Accelerate loop", "Lightning")  # batches as drawn


def one(contender: str, processes: int, precision: str, common: list[str], micro_batches: int) -> dict:
    """Run one contender in its own process, or several under torchrun."""
    script, *extra = CONTENDERS[contender]
    if script == LOCKSTEP and "--micro-batches" not in extra:
        extra = ["--micro-batches", str(micro_batches), *extra]
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        settings = ["--precision", precision, "--json", out.name]
        command = [sys.executable, *start, str(HERE / script), *common, *settings, *extra]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode != 0:
            raise SystemExit(f"{contender} failed:\n{done.stderr[-3000:]}")
        found = json.loads(Path(out.name).read_text())
    if (found["world"], found["precision"]) != (processes, precision):
        raise SystemExit(f"{contender} ran on {found['world']} processes in {found['precision']}")
    return found


def limited(common: list[str], limit: int, folder: Path) -> list[str]:
    """Arguments with a training file of the first `limit` examples, the same for all contenders."""
    place = common.index("--train") + 1
    source, target = Path(common[place]), folder / f"first-{limit}.jsonl"
    with source.open(encoding="utf-8") as rows, target.open("w", encoding="utf-8") as kept:
        written = sum(kept.write(row) > 0 for row in islice((row for row in rows if row.strip()), limit))
    if written < limit:
        raise SystemExit(f"--limit: {source.name} holds {written} examples only")
    return [*common[:place], str(target), *common[place + 1 :]]


def processor() -> str:
    """Name of the processor, if available."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()


def allocator() -> str:
    """Allocator of the contenders: a library in LD_PRELOAD, or glibc with its settings."""
    return Path(os.environ.get("LD_PRELOAD", "")).name or f"glibc {os.environ.get('GLIBC_TUNABLES', '')}".strip()


def gpu() -> str | None:
    """Name of the GPU, or None."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def ratio(runs: list[dict], key: tuple, name: str, other: str) -> str:
    """Median over rounds of the ratio of two contenders' rates."""
    rates = [
        {
            r["round"]: r["examples_per_s"]
            for r in runs
            if (r["processes"], r["precision"], r["contender"]) == (*key, who)
        }
        for who in (name, other)
    ]
    found = [rate / rates[1][number] for number, rate in rates[0].items() if number in rates[1]]
    return f"{statistics.median(found):.2f}" if found else "-"


def table(runs: list[dict], baseline: str) -> str:
    """Medians by contender. The best-tuned peer has the highest median rate of these runs."""
    columns = ["processes", "precision", "", "examples/s", f"x {baseline}", "x best-tuned peer", "CPU ms/example"]
    columns += [
        "first step s",
        "peak MiB, largest rank",
        "sum of ranks",
        "padding",
        "held-out loss",
        "accuracy",
        "runs",
    ]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for key in sorted({(r["processes"], r["precision"]) for r in runs}, key=str):
        of_key: dict[str, list[dict]] = {}
        for run in runs:
            if (run["processes"], run["precision"]) == key:
                of_key.setdefault(run["contender"], []).append(run)
        rates = {name: statistics.median(r["examples_per_s"] for r in mine) for name, mine in of_key.items()}
        tuned = [name for name in rates if not name.startswith("lockstep") and name not in UNTUNED]
        best = max(tuned, key=lambda name: rates[name], default="")
        for name, mine in of_key.items():
            middle = {k: statistics.median(r[k] for r in mine) for k in mine[0] if isinstance(mine[0][k], int | float)}
            cells = [str(key[0]), key[1], name + (" (best-tuned peer)" if name == best else ""), f"{rates[name]:.1f}"]
            cells += [ratio(runs, key, name, baseline), ratio(runs, key, name, best)]
            cells += [f"{middle['cpu_s_per_example'] * 1e3:.2f}", f"{middle['time_to_first_step_s']:.1f}"]
            cells += [mib(middle, "peak_memory_bytes"), mib(middle, "peak_memory_sum_bytes")]
            cells += [f"{middle['padding_ratio']:.2f}"]
            cells += [f"{middle['loss_after']:.3f}" if "loss_after" in middle else "-"]
            cells += [f"{middle['accuracy']:.4f}" if "accuracy" in middle else "-", str(len(mine))]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def mib(numbers: dict, name: str) -> str:
    return f"{numbers[name] / 2**20:.0f}" if name in numbers else "-"


def page(saved: dict, baseline: str) -> str:
    """Format the content of `--out` as Markdown."""
    hardware, versions = saved["hardware"], saved["runs"][0]["versions"]
    return (
        f"{hardware['gpu'] + ', ' if hardware.get('gpu') else ''}{hardware['processor']}, {hardware['cores']} cores, "
        f"{hardware['allocator'] + ', ' if 'allocator' in hardware else ''}{hardware['date']}; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}; "
        f"`{' '.join(hardware['arguments'])}`. Medians over runs; ratios are medians of the ratios within a round. "
        "Memory: the most a rank's process held (VmHWM) less what it held after its imports, or on a GPU the most its "
        "tensors took; "
        "held-out loss: of 64 validation examples at the end.\n\n" + table(saved["runs"], baseline) + "\n"
    )


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse this program's own arguments, and those for every contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="begin no round that would, by the longest so far, end later")
    parser.add_argument("--limit", type=int, help="the first N training examples only")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--contenders", nargs="+", default=ASKED, metavar="NAME", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--once", nargs="+", default=[], metavar="NAME", help="contenders of the first round only")
    parser.add_argument(
        "--variant", nargs="+", action="append", default=[], metavar=("NAME", "KEY=VALUE"),
        help="one more lockstep, under this name, with these keys of the run file",
    )  # fmt: skip
    parser.add_argument("--baseline", default="lockstep")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", action="store_true", help="print the table of what --out already holds")
    own, common = parser.parse_known_args()
    for name, *keys in own.variant:
        CONTENDERS[name if name.startswith("lockstep") else f"lockstep, {name}"] = [LOCKSTEP, "--set", *keys]
    own.contenders = [*own.contenders, *(name for name in CONTENDERS if "--set" in CONTENDERS[name])]
    if unknown := {*own.contenders, *own.once} - set(CONTENDERS):
        parser.error(f"there is no contender {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    return own, common


def main() -> None:
    own, common = arguments()
    if own.show:
        print(page(json.loads(own.out.read_text()), own.baseline))
        return
    shown = [*common, *(["--limit", str(own.limit)] if own.limit else [])]
    hardware = {
        "processor": processor(),
        "gpu": gpu() if "cuda" in common else None,
        "cores": os.cpu_count(),
        "allocator": allocator(),
        "date": time.strftime("%Y-%m-%d"),
        "arguments": [Path(a).name if "/" in a else a for a in shown],
    }
    runs: list[dict] = []
    started, longest = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        common = limited(common, own.limit, Path(folder)) if own.limit else common
        for number in range(own.rounds):
            begun = time.monotonic()
            if own.minutes and begun + longest - started > own.minutes * 60:
                break
            for processes in own.processes:
                for precision in own.precisions:
                    for contender in own.contenders:  # interleaved, so that a slow minute of the machine affects all
                        if number > 0 and contender in own.once:
                            continue
                        found = one(contender, processes, precision, common, own.micro_batches)
                        runs.append({"contender": contender, "processes": processes, "round": number, **found})
                        own.out.write_text(json.dumps({"hardware": hardware, "runs": runs}, indent=1))
                        rate = found["examples_per_s"]
                        print(f"round {number}: {processes} x {precision} {contender}: {rate:.1f}/s", flush=True)
            longest = max(longest, time.monotonic() - begun)
    text = page(json.loads(own.out.read_text()), own.baseline)
    own.out.with_suffix(".md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
