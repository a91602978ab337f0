"""Every family of models that transformers knows, tiny: how far the run's own path and a plain one are apart.

In: heads and families to try (all by default), and settings of the run file. Out: a line of JSON a family and head in
--out, which a later call goes on with; a summary with --table. Nothing is trained.
Example: python benchmarks/plain_check.py --out plain.jsonl --set precision=bf16; then the same with --table
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from families import TASKS, families, run_of, write_data

from lockstep.config.run import Run, RunError, load, overrides_of
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.tasks.task import make_task
from lockstep.training import plain_check, plain_sides
from lockstep.training.data_loader import StepLoader
from lockstep.training.resolve import resolve_strategy


def measured(run: Run) -> dict[str, Any]:
    """Largest relative differences of loss and gradient, in float32 and in the run's precision; or why it is not
    compared."""
    world = World(run)
    strategy = resolve_strategy(run, 1)(Job.of(run, world.size), world)
    task = make_task(Job.of(run).with_data())
    strategy.build(task)
    strategy.dry_run(StepLoader(task, strategy.own_micro_batches(), world.device).longest())
    sides = plain_sides.sides_of(task, strategy)
    found: dict[str, Any] = {"padded": task.padded_because}
    ways = {"fp32": False} if plain_check.takes_float32(task) else {}
    ways |= {run.precision: True} if run.precision != "fp32" else {}
    groups = plain_check.groups_of(sides)
    plain = {name: plain_check.plain_numbers(sides, places) for name, places in groups.items()}
    own = plain_check.own_numbers
    for way, on in ways.items():
        apart = [
            plain_check.largest_differences(own(sides, places, strategy.precision.autocast(on)), plain[name])
            for name, places in groups.items()
        ]
        found |= {f"loss {way}": max(x.loss for x in apart), f"gradient {way}": max(x.gradient for x in apart)}
    if run.precision != "fp32":  # basis of the tolerances
        rounded = plain_check.half_precision(sides, groups, plain)
        found |= {"loss by half precision": rounded.loss, "gradient by half precision": rounded.gradient}
    found["stopped"] = [str(each) for each in plain_check.plain_differences(sides, strategy)][:2]
    strategy.close()
    return found


def tried(head: str, family: str, folder: Path, settings: list[str], timeout_s: int) -> dict[str, Any]:
    """Try one family."""

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(timeout_s)
    line: dict[str, Any] = {"head": head, "family": family}
    try:
        values = run_of(head, family, folder, "single").model_dump(mode="json")
        return line | measured(load(None, overrides_of(settings), values))
    except RunError as caught:
        return line | {"refused": " ".join(str(caught).split())[:200]}
    except (plain_sides.Elsewhere, plain_check.NotCovered) as caught:
        return line | {"elsewhere": str(caught)[:200]}
    except Exception as caught:
        return line | {"fails": f"{type(caught).__name__}: {' '.join(str(caught).split())[:200]}"}
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="*", default=list(TASKS))
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("plain.jsonl"))
    parser.add_argument("--set", nargs="*", default=[], help="keys of the run file, as key=value")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for one family")
    parser.add_argument("--table", action="store_true", help="only print what is in --out")
    options = parser.parse_args()
    known = [json.loads(x) for x in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.table:
        print(table(known))
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    done = {(x["head"], x["family"]) for x in known}
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name))
        for head in options.heads:
            for family in options.families or families(head):
                if (head, family) in done or family not in families(head):
                    continue
                line = tried(head, family, Path(name), options.set, options.timeout)
                print(json.dumps(line), flush=True)
                with options.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")


def table(lines: list[dict[str, Any]]) -> str:
    """Format as Markdown: families compared, the largest differences, and those that stopped a run."""
    said = [
        "| head | compared | stopped | not compared | not trained | largest differences |",
        "|---|---|---|---|---|---|",
    ]
    for head in TASKS:
        ours = [x for x in lines if x["head"] == head]
        compared = [x for x in ours if "stopped" in x]
        keys = sorted({key for x in compared for key in x if key.startswith(("loss ", "gradient "))})
        largest = ", ".join(f"{key} {max(x[key] for x in compared if key in x):.1e}" for key in keys)
        stopped = [x["family"] for x in compared if x["stopped"]]
        counts = [sum(key in x for x in ours) for key in ("elsewhere", "refused")]
        counts[1] += sum("fails" in x for x in ours)
        said.append(
            f"| {head} | {len(compared)} | {', '.join(stopped) or 'none'} | {counts[0]} | {counts[1]} | {largest} |"
        )
    return "\n".join(said)


if __name__ == "__main__":
    main()
