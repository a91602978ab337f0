"""The hash of the exported weights of the quick start and of a small run under every strategy: before and after what
shall change nothing.

In: nothing, or the file that an earlier call wrote. Out: JSON, `strategy@processes precision` -> SHA-256 of
export/model.safetensors; with an earlier file also what differs, and status 1 if something does.
Example: python benchmarks/hashes.py --out before.json; (change); python benchmarks/hashes.py --before before.json
Hashes are comparable on one machine with the same versions only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

GPT2 = {"n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": 64}  # with its dropout of 0.1
RUN: dict[str, Any] = {
    "task": {"name": "classification"},
    "data": {"source": "builtin/emotion", "max_length": 48, "limit": 400},
    "model": {"type": "gpt2", "config": GPT2},
    "tokenizer": {"train": "bpe", "vocab_size": 400},
    "steps": 6,
    "batch_size": 32,
    "micro_batches": 6,
    "evaluate": {"every": 3},
    "checkpoint": {"every": 3},
}
EVERYWHERE = [("single", 1), ("allreduce", 2), ("allreduce", 3), ("ddp", 2), ("ddp", 3), ("fsdp2", 1), ("fsdp2", 2)]
EVERYWHERE += [("fsdp2", 3), ("pipeline", 2), ("hf_accelerate", 2), ("hf_trainer", 2)]
CASES = [(name, processes, precision) for precision in ("fp32", "bf16") for name, processes in EVERYWHERE]
CASES += [(f"zero{stage}", 2, "fp32") for stage in (1, 2, 3)]


def trained(folder: Path, words: list[str]) -> str:
    """Train with the command, and return the hash of the export."""
    command = [sys.executable, "-m", "lockstep", "train", *words, f"output={folder}", "launch.threads=1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return hashlib.sha256((folder / "export" / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a file of an earlier call, to compare with")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name this regular expression matches: in parts")
    args = parser.parse_args()
    hashes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as room:
        run = Path(room, "run.yaml")
        run.write_text(yaml.safe_dump(RUN))
        for name, processes, precision in CASES:
            case = f"{name}@{processes} {precision}"
            if not re.search(args.only, case):
                continue
            words = [str(run), f"strategy.name={name}", f"launch.processes={processes}", f"precision={precision}"]
            hashes[case] = trained(Path(room, case.replace(" ", "-")), words)
            print(case, hashes[case], flush=True)
        if re.search(args.only, "quick start"):
            hashes["quick start"] = trained(Path(room, "quick-start"), ["steps=20"])
            print("quick start", hashes["quick start"])
    if args.out:
        args.out.write_text(json.dumps(hashes, indent=1) + "\n")
    if args.before:
        before = json.loads(args.before.read_text())
        if other := {case for case in hashes if hashes[case] != before[case]}:
            raise SystemExit(f"other weights than before: {', '.join(sorted(other))}")
        print(f"the same weights as before: {len(hashes)} of {len(before)}")


if __name__ == "__main__":
    main()
