"""Processor time of commands that mostly import, for one source tree or two by turns.

    python benchmarks/start.py --rounds 3 --out start.json [--before OTHER/src]

Out: seconds of processor time (user and system) of each command, a list a tree, and of `import torch` alone beside
them, which is most of what is left. The cache is warm: each command runs once before it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

OURS = Path(__file__).resolve().parents[1] / "src"
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "--help": ["-m", "lockstep", "--help"],
    "list": ["-m", "lockstep", "list"],
    "plan": ["-m", "lockstep", "plan"],
    "init": ["-m", "lockstep", "init", "run.yaml", "--data", "reviews.csv", "--force"],
}


def seconds(words: list[str], source: Path, folder: Path) -> float:
    """CPU time of a process and its children. Errors: `RuntimeError` if it fails."""
    variables = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    nothing = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    nothing += [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    os.chdir(folder)
    child = os.posix_spawn(sys.executable, [sys.executable, *words], variables, file_actions=nothing)
    _, status, used = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"{words} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, help="the src of another source tree")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    known = parser.parse_args()
    out = known.out.resolve()
    trees = {"before": known.before.resolve()} if known.before else {}
    trees["now"] = OURS
    with tempfile.TemporaryDirectory() as folder:
        rows = [f"the film {at} was {word},{word}" for at in range(60) for word in ("good", "bad")]
        Path(folder, "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")
        measured: dict[str, dict[str, list[float]]] = {name: {tree: [] for tree in trees} for name in COMMANDS}
        for turn in range(known.rounds + 1):
            for name, words in COMMANDS.items():
                for tree, source in trees.items():
                    taken = seconds(words, source, Path(folder))
                    if turn:
                        measured[name][tree].append(round(taken, 3))
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    machine |= {"load": f"{os.getloadavg()[0]:.1f}", "date": time.strftime("%Y-%m-%d")}
    out.write_text(json.dumps({"machine": machine, "processor seconds": measured}, indent=1) + "\n")
    for name, of in measured.items():
        print(name, {tree: (statistics.median(each), min(each), max(each)) for tree, each in of.items()})


if __name__ == "__main__":
    main()
