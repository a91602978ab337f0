"""Every strategy on one real job, at 1, 2 and 4 processes: the same training, how fast, and what a rank holds.

In: a run file (or the quick start) and overrides. Out: a Markdown table, and every recording as JSON in --out.
Example: python benchmarks/strategies.py runs/minilm-emotion.yaml model.source=MINILM --out strategies.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from run import processor

from lockstep.config import plugins
from lockstep.config.run import QUICK_START, Run, RunError, load, write_run_yaml
from lockstep.data.job import Job, strategy_class
from lockstep.proof.recording import Recording, read
from lockstep.proof.verify import RECORD, compare_recordings, findings, record_alone
from lockstep_trace.compare_traces import Comparison

# (name in the table, strategy.name, strategy.options)
EVERY: list[tuple[str, str, dict]] = [
    ("single", "single", {}),
    ("allreduce", "allreduce", {}),
    ("ddp", "ddp", {}),
    ("hf_accelerate", "hf_accelerate", {}),
    ("hf_accelerate, fsdp", "hf_accelerate", {"fsdp": {}}),
    ("hf_accelerate, deepspeed 2", "hf_accelerate", {"deepspeed": {"zero_stage": 2}}),
    ("hf_trainer", "hf_trainer", {}),
    ("zero1", "zero1", {}),
    ("zero2", "zero2", {}),
    ("zero3", "zero3", {}),
    ("fsdp2, gather: step", "fsdp2", {"gather": "step"}),
    ("fsdp2", "fsdp2", {"gather": "micro_batch"}),
    ("fsdp2, 2 replicas", "fsdp2", {"replicate": 2}),
    ("pipeline", "pipeline", {}),
    ("pipeline, 2 stages", "pipeline", {"stages": 2}),
]


def job(run: Run, name: str, options: dict, processes: int, folder: Path) -> Run:
    """The same job under another strategy."""
    values = run.model_dump(mode="json")
    values["strategy"] = {"name": name, "exact": run.strategy.exact, "options": options}
    values["launch"] |= {"name": "local", "processes": processes, "device": "cpu", "threads": 1}
    values["output"] = str(folder)
    return Run.model_validate(values)


def record(run: Run, steps: int, timed: int) -> str | None:
    """Record the job in its own processes; returns None, or the error."""
    write_run_yaml(run)
    code = (
        "import sys; from lockstep.config.run import load; from lockstep.launchers.local import Local as L; "
        "r = load(sys.argv[1], []); sys.exit(L().start(L().plan(r), sys.argv[2:]))"
    )
    command = [sys.executable, "-c", code, str(run.folder / "run.yaml"), RECORD, str(steps), str(timed)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return None if done.returncode == 0 else done.stderr[-2000:]


def apart(verdict: Comparison, what: str) -> str:
    """Largest difference from `single` over all steps."""
    most = max(getattr(row, what) or 0.0 for row in verdict.rows)
    return "same bits" if most == 0 else f"{most:.0e}"


def row(label: str, found: Recording, verdict: Comparison, wrong: list[str], base: Recording) -> list[str]:
    speed = (found.examples_per_s or 0) / (base.examples_per_s or 1)
    mib = [max(h[key] for h in found.held) / 2**20 for key in ("at_rest", "at_update")]
    first = found.steps[0]
    return [
        label,
        str(found.processes),
        f"{first.loss:.6f}",
        f"{first.grad_norm:.6f}",
        *(apart(verdict, what) for what in ("loss", "norm", "gradient")),
        f"{found.examples_per_s:.1f}",
        f"{speed:.2f}",
        *(f"{m:.1f}" for m in mib),
        "as promised" if not wrong else "NOT as promised",
    ]


COLUMNS = ["strategy", "processes", "loss", "norm", "loss differs", "norm differs", "gradients differ", "examples/s"]
COLUMNS += ["x single", "MiB at rest", "MiB at the update", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="RUN.yaml key=value")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timed", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=None, metavar="NAME", help="labels of the table")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    path = next((w for w in args.words if "=" not in w), None)
    run = load(path, [w for w in args.words if "=" in w], QUICK_START)
    known = {name for _, name, _ in EVERY}
    assert known == set(plugins.names("strategies")), "the table must name every strategy"
    folder = Path(tempfile.mkdtemp(prefix="lockstep-strategies-"))
    single = folder / "single"
    table: list[list[str]] = []
    kept: list[dict[str, Any]] = []
    try:
        if record_alone(
            run.model_copy(update={"launch": run.launch.model_copy(update={"threads": 1})}),
            single,
            args.steps,
            args.timed,
        ):
            raise SystemExit("the single process failed")
        base = read(single)
        for label, name, options in EVERY:
            for processes in args.processes:
                if args.only and label not in args.only:
                    continue
                mine = job(run, name, options, processes, folder / f"{len(kept)}")
                try:
                    strategy_class(mine).check(Job.of(mine, processes))
                except RunError as refused:
                    print(f"{label} at {processes}: refused: {refused}", flush=True)
                    continue
                start = time.perf_counter()
                if (failed := record(mine, args.steps, args.timed)) is not None:
                    raise SystemExit(f"{label} at {processes} processes failed:\n{failed}")
                found = read(mine.folder)
                verdict = compare_recordings(mine.folder, single)
                wrong = findings(found, verdict)
                table.append(row(label, found, verdict, wrong, base))
                found = replace(
                    found, steps=[replace(s, before={}, computed=(), gradients={}, after={}) for s in found.steps]
                )
                kept.append({"label": label, "options": options, "wrong": wrong, **asdict(found)})
                args.out.write_text(json.dumps({"processor": processor(), "runs": kept}, indent=1))
                print(f"{label} at {processes}: {table[-1][4:]} ({time.perf_counter() - start:.0f} s)", flush=True)
                shutil.rmtree(mine.folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{processor()}, {os.cpu_count()} cores\n")
    for cells in [COLUMNS, ["---"] * len(COLUMNS), *table]:
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
