"""What it takes to plan `runs/chat-8b.yaml` at 8, 64 and 1,024 processes, one plan after another, and what they say.

In: nothing, or other numbers of processes, and overrides of the run file. Out: a line of JSON a plan: what
`lockstep plan` says, the processor time of all its processes and the memory of the largest; asked for, the page of all
of them. The data are conversations of unlike length, put together from the built-in messages by a seed.
Example: python benchmarks/plan_8b.py --out FILE --page plan.html
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep.data import builtin

ROOT = Path(__file__).resolve().parents[1]


def conversations(path: Path, count: int) -> None:
    """Write conversations of one to four turns, one per line, with log-normal lengths."""
    messages = builtin.emotion(0, train=60_000)["train"]["text"]
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            turns = []
            for _ in range(draw.randint(1, 4)):
                asked, answered = (max(1, int(draw.lognormvariate(mean, 0.8))) for mean in (0.7, 2.2))
                for role, size in (("user", asked), ("assistant", answered)):
                    turns.append({"role": role, "content": ". ".join(draw.choices(messages, k=size))})
            file.write(json.dumps({"messages": turns}) + "\n")


def planned(words: list[str], folder: Path) -> dict[str, object]:
    """Run the command; returns its lines by first word, CPU time and memory."""
    command = [sys.executable, "-m", "lockstep", "plan", str(ROOT / "runs/chat-8b.yaml"), "--simulate", *words]
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, stdout=out, cwd=folder, env=os.environ | {"COLUMNS": "400"})
        _, status, used = os.wait4(child.pid, 0)  # including its finished children
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        lines = out.read().splitlines()
    if child.returncode not in (0, 1):  # 1: it does not fit
        raise SystemExit(child.returncode)
    said = {line[:11].strip(): line[11:].strip() for line in lines if line[10:11] == " " and line[:1].strip()}
    return {"said": said, "processor_s": round(used.ru_utime + used.ru_stime, 1), "most_memory_kb": used.ru_maxrss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the run file")
    parser.add_argument("--processes", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--conversations", type=int, default=4096)
    parser.add_argument("--out", type=Path, help="lines are added to it")
    parser.add_argument("--page", type=Path, help="of all plans, which are made once more for it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        conversations(folder / "conversations.jsonl", args.conversations)
        given = [*args.overrides, "--device", args.device]
        for count in args.processes:
            line = json.dumps({"processes": count, **planned([*given, "--processes", str(count)], folder)})
            print(line, flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        if args.page:
            counts = [str(count) for count in args.processes]
            planned([*given, "--price", "2.5", "--processes", *counts, "--out", str(args.page.resolve())], folder)


if __name__ == "__main__":
    main()
