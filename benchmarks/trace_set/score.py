"""Score `lockstep-trace record` on scripts that were written without knowledge of its rules.

    python benchmarks/trace_set/score.py HALF [OUT.jsonl]     HALF: development, held-out or all

Each script is run as its second line says, with the tracer of this checkout. Out: a line for each script with the
codes of its findings by level, and a table. A healthy script that has a finding of level `wrong` was accused in error.
Whether a finding names a faulty script's fault is a person's judgement: `# fault:` in the script names it.
The halves were drawn by a hash before any rule was changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
TRACER = HERE.parents[1] / "packages/lockstep-trace/src"
FINDING = re.compile(r"^lockstep trace: \[([\w-]+)\] (suspicious|info)?", re.M)
LIMIT_S = 300


def half_of(script: Path) -> str:
    """The half that a script belongs to, drawn by a hash of its kind and name."""
    digest = hashlib.md5(f"20261128 {script.parent.name} {script.name}".encode(), usedforsecurity=False).hexdigest()
    return "development" if digest[0] in "01234567" else "held-out"


def findings_of(script: Path) -> dict[str, list[str]]:
    """Level -> codes of the findings of a run of a script."""
    second = script.read_text(encoding="utf-8").splitlines()[1]
    launcher = shlex.split(second.removeprefix("# run: ")) if second.startswith("# run: ") else [sys.executable]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep_trace", "record", "-o", "trace", "--verbose", "--", *launcher, script],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(TRACER), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{script} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    levels: dict[str, list[str]] = {"wrong": [], "suspicious": [], "info": []}
    for code, level in FINDING.findall(done.stderr):
        levels[level or "wrong"].append(code)
    return levels


def main(half: str, out: str | None = None) -> None:
    """Run the scripts of a half, and print what was found in how many."""
    accused: Counter[tuple[str, str]] = Counter()
    scripts = [s for s in sorted(HERE.glob("*/*.py")) if half in ("all", half_of(s))]
    for script in scripts:
        levels = findings_of(script)
        highest = next((level for level, codes in levels.items() if codes), "nothing")
        accused[script.parent.name, highest] += 1
        line = json.dumps({"kind": script.parent.name, "script": script.stem, "half": half_of(script)} | levels)
        print(line, flush=True)
        if out is not None:
            with open(out, "a", encoding="utf-8") as file:
                file.write(line + "\n")
    for kind in ("healthy", "faulty"):
        row = ", ".join(f"{level} {accused[kind, level]}" for level in ("wrong", "suspicious", "info", "nothing"))
        print(f"{kind}: {row}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
