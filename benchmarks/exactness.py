"""The hash of the exported weights for every strategy and number of processes: one value, and a control that differs.

In: a data folder or file and a model folder. Out: a Markdown table of SHA-256 over export/model.safetensors.
Example: python benchmarks/exactness.py --model MINILM --data DATA --steps 20
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

CASES = [("single", 1), *((name, n) for name in ("allreduce", "ddp") for n in (1, 2, 3, 4))]
CONTROLS = [("allreduce", n) for n in (1, 2, 3)]


def weights(folder: str, args: argparse.Namespace, strategy: str, processes: int, exact: bool) -> str:
    """Train from the start with the command, and return the hash of the export."""
    output = Path(folder, f"{strategy}-{processes}-{exact}")
    values = {
        "output": str(output),
        "data": {"source": args.data},
        "model": {"source": args.model},
        "steps": args.steps,
        "batch_size": args.batch_size,
        "micro_batches": 8,
        "precision": args.precision,
        "optim": {"learning_rate": 2e-4, "warmup_steps": 5},
        "strategy": {"name": strategy, "exact": exact},
        "launch": {"processes": processes, "threads": 1, "device": "cpu"},
        "checkpoint": {"every": 0},
    }
    run = Path(folder, "run.yaml")
    run.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "lockstep", "train", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return hashlib.sha256((output / "export" / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    print("| strategy | processes | SHA-256 of the weights |\n|---|---|---|")
    found = set()
    with tempfile.TemporaryDirectory() as folder:
        for exact, cases in ((True, CASES), (False, CONTROLS)):
            for strategy, processes in cases:
                value = weights(folder, args, strategy, processes, exact)
                name = strategy if exact else f"control: {strategy}, exact=false"
                print(f"| {name} | {processes} | `{value}` |", flush=True)
                if exact:
                    found.add(value)
                elif value in found:
                    raise SystemExit("the control has the same bits: this comparison shows nothing")
    if len(found) != 1:
        raise SystemExit(f"{len(found)} different results")
    print(f"\nidentical: {len(CASES)} of {len(CASES)}")


if __name__ == "__main__":
    main()
