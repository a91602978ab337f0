"""Ranks that are killed while they train, hundreds of times, and what it costs: `launch.on_rank_failure: continue`.

In: how many kills, from which seed. Out: a table, and everything as JSON in --out. `strikes`: jobs of 2 to 6 ranks that
kill themselves in random phases of random steps (tests/support/self_killing_strategies.py), until so many are dead;
each job has to end with the bits and the lines of one that nobody touched. It goes on from what --out holds. `seconds`:
from kill -9 of a random rank to the next finished step, and how many steps are trained again, by turns: `continue`,
`restart`, plain torchrun (peers/snapshots.py).
`cost`: processor seconds a step, and memory, of a job that nobody touches, with and without the key, in turns; with
`--copies K` of `fsdp2` with a copy every K steps.
Example: python benchmarks/faults.py strikes --kills 500 --out benchmarks/results/faults.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from run import processor

from support import rank_kills
from support.command import (
    LOCKSTEP,
    Process,
    finish,
    lines,
    processes_in,
    ranks_of,
    start,
    start_anew,
    step_of,
    until,
    write,
)
from support.self_killing_strategies import EXCHANGE

KINDS = ("continue", "restart", "torchrun")  # the last: peers/snapshots.py
PATIENCE_S = 3600.0  # a failure must end
LIMIT_S = 30.0  # after a lost rank, the longest time until the job counts as hung
SNAPSHOTS = Path(__file__).resolve().parent / "peers" / "snapshots.py"


def strikes(place: Path, kills: int, seed: int, out: Path | None) -> dict:
    """Run jobs with a dozen kills each until the requested number. Continues from the results in `out`, and writes each
    finished job there."""
    cache, untouched = place / "cache", place / "untouched"
    found = json.loads(out.read_text())["strikes"] if out and out.exists() else {"each": [], "what was said": []}
    jobs, lost = [rank_kills.Job(**each) for each in found["each"]], found["what was said"]
    write(untouched, **rank_kills.VALUES)
    finish(untouched, cache, "launch.processes=1", "strategy.name=single")
    while sum(len(job.done) for job in jobs) < kills:
        job = rank_kills.draw_job(seed + len(jobs), 12, rank_kills.VALUES["steps"])
        folder = place / f"job-{job.seed}"
        try:
            rank_kills.carried_out(job, folder, cache, untouched)
            shutil.rmtree(folder)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            lost.append(str(error))
            cleared(folder)
        jobs.append(job)
        done = Counter(each["phase"] for each in job.done)
        print(job.seed, job.strategy, job.world, dict(done), f"restarted {job.restarted}", job.equal, flush=True)
        found = summary(jobs, lost, seed)
        if out:
            keep(out, {"strikes": found})
    return found


def summary(jobs: list[rank_kills.Job], lost: list[str], seed: int) -> dict:
    """Summarize all jobs for the record."""
    phases = Counter(each["phase"] for job in jobs for each in job.done)
    return {
        "kills": sum(phases.values()),
        "in the exchange or the update": sum(phases[phase] for phase in EXCHANGE),
        "of rank 0": sum(each["rank"] == 0 for job in jobs for each in job.done),
        "phases": dict(phases),
        "jobs": len(jobs),
        "jobs with other bits, lines or status": len(lost),
        "jobs in which all ranks started again": sum(job.restarted > 0 for job in jobs),
        "what was said": lost,
        "seed": seed,
        "each": [job.plain() for job in jobs],
    }


def keep(out: Path, found: dict) -> None:
    """Write the file atomically."""
    aside = out.with_name(out.name + ".new")
    aside.write_text(json.dumps({"processor": processor(), **found}, indent=1))
    aside.rename(out)


def seconds(place: Path, rounds: int, seed: int) -> dict:
    """Kill a random rank at a random moment; checkpoints are every 20 steps. Each round has one job of each kind, in
    random order."""
    chance, found = random.Random(seed), {how: list[dict[str, float]]() for how in KINDS}
    for number in range(rounds):
        for how in chance.sample(KINDS, len(KINDS)):
            folder = place / f"timed-{number}-{how}"
            found[how].append(killed(folder, place / "cache", how, chance))
            shutil.rmtree(folder, ignore_errors=True)
            print(how, found[how][-1], flush=True)
    keys = ("seconds", "steps trained again")
    medians = {how: {key: statistics.median(each[key] for each in rows) for key in keys} for how, rows in found.items()}
    hung = {how: sum(each["did not go on"] for each in rows) for how, rows in found.items()}
    return {"medians": medians, "did not go on": hung, "rounds": found, "seed": seed}


def killed(folder: Path, cache: Path, how: str, chance: random.Random) -> dict[str, float]:
    """Time from a kill to the next finished step."""
    process, ranks = begun(folder, cache, how)
    wanted = 25 + chance.randint(0, 20)
    until(lambda: step_of(folder) >= wanted, "some steps", process, PATIENCE_S)
    time.sleep(chance.random() * 0.1)
    trained, began = step_of(folder), time.monotonic()
    os.kill(chance.choice(ranks()), signal.SIGKILL)
    events, metrics = folder / "out" / "events.jsonl", folder / "out" / "metrics.jsonl"
    sign, before = ('"event": "regroup"', 0) if how == "continue" else ('"event": "start"', 1)
    try:
        until(lambda: events.read_text().count(sign) > before, "the ranks to go on", process, LIMIT_S)
    except AssertionError:
        end(process, folder)
        return {"seconds": LIMIT_S, "steps trained again": 0, "did not go on": 1}
    at = json.loads([line for line in events.read_text().splitlines() if sign in line][before])["step"]
    last = metrics.stat().st_mtime_ns  # lines of repeated steps stay until then
    until(lambda: metrics.stat().st_mtime_ns > last and lines(folder)[-1]["step"] > at, "a step", process, PATIENCE_S)
    took = time.monotonic() - began
    end(process, folder)
    return {"seconds": took, "steps trained again": max(0, trained - at), "did not go on": 0}


def begun(folder: Path, cache: Path, how: str) -> tuple[Process, Callable[[], list[int]]]:
    """Start a job of three ranks; returns it with a way to read the process ids."""
    if how == "torchrun":
        folder.mkdir()
        words = ["--standalone", "--nproc_per_node=3", "--max-restarts=100", str(SNAPSHOTS), "--every=20"]
        # otherwise restarted ranks may read the addresses of the previous ones (torch issue 135712; also seen here)
        apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        plain = start_anew([sys.executable, "-m", "torch.distributed.run", *words], folder, cache, **apart)
        return plain, lambda: sorted(pid for pid, parent in processes_in(folder).items() if parent == plain.pid)
    write(folder, steps=100_000, evaluate={"every": 0}, checkpoint={"every": 20}, optim={"schedule": "constant"})
    options = [
        f"launch.on_rank_failure={how}",
        "launch.max_restarts=100",
        "launch.processes=3",
        "strategy.name=allreduce",
    ]
    process = start([*LOCKSTEP, "train", "run.yaml", *options], folder, cache)
    return process, lambda: ranks_of(process, folder)


def end(process: Process, folder: Path) -> None:
    """Terminate all processes of a job."""
    with suppress(OSError):
        os.kill(process.pid, signal.SIGKILL)
    cleared(folder)
    process.communicate()


def cleared(folder: Path) -> None:
    """Wait until nothing runs in `folder`."""
    for pid in processes_in(folder):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not processes_in(folder), "the ranks to end")


def used(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process."""
    seconds = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the process has ended
            seconds[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def cost(place: Path, rounds: int, steps: int, copies: int) -> dict:
    """CPU seconds per step of both ranks and their launcher, alternating job kinds. The ratio is the median over rounds
    of one job of each kind. The launcher's and other threads are listed separately: the main threads run the same code
    with and without the key, and vary more between jobs. `copies`: peer checkpoints every so many steps."""
    found: dict[str, list[dict[str, float]]] = {"restart": [], "continue": []}
    name = "fsdp2" if copies else "allreduce"
    for number in range(2 * rounds):
        how = ("restart", "continue", "continue", "restart")[number % 4]
        folder = place / f"cost-{number}"
        words = [f"launch.on_rank_failure={how}", f"strategy.name={name}"]
        words += [f"launch.replicate_every={copies}"] if how == "continue" and copies else []
        found[how].append(spent(folder, place / "cache", words, steps))
        shutil.rmtree(folder)
        print(how, found[how][-1], flush=True)
    ratios = {
        key: [new[key] / old[key] for new, old in zip(found["continue"], found["restart"], strict=True)]
        for key in found["restart"][0]
    }
    return {
        "ratio": {key: statistics.median(each) for key, each in ratios.items()},
        "from, to": {key: (min(each), max(each)) for key, each in ratios.items()},
        "medians": {
            how: {key: statistics.median(each[key] for each in rows) for key in rows[0]} for how, rows in found.items()
        },
        "rounds": found,
        "steps": steps,
        "strategy": name,
        "steps between copies": copies,
    }


def spent(folder: Path, cache: Path, words: list[str], steps: int) -> dict[str, float]:
    """CPU seconds per step of an undisturbed job, and its ranks' memory (MB) with shared pages divided."""
    write(folder, steps=steps + 500, evaluate={"every": 0}, checkpoint={"every": 0}, track={"every": 10})
    process = start([*LOCKSTEP, "train", "run.yaml", "launch.processes=2", *words], folder, cache)
    until(lambda: step_of(folder) >= 100, "some steps", process, PATIENCE_S)
    all_of_them, ranks, first = [*processes_in(folder)], ranks_of(process, folder), step_of(folder)
    before = {pid: used(pid) for pid in all_of_them}
    until(lambda: step_of(folder) >= steps, "more steps", process, PATIENCE_S)
    after, steps_between = {pid: used(pid) for pid in all_of_them}, step_of(folder) - first
    spent_in = {
        (pid, thread): seconds - before[pid].get(thread, 0.0)
        for pid, of in after.items()
        for thread, seconds in of.items()
    }
    beside = sum(seconds for (pid, thread), seconds in spent_in.items() if pid not in ranks or thread != pid)
    memory = sum(map(held, ranks_of(process, folder)))
    end(process, folder)
    return {
        "processor seconds a step": sum(spent_in.values()) / steps_between,
        "of it beside the ranks' main threads": beside / steps_between,
        "memory of the ranks, MB": memory,
    }


def held(pid: int) -> float:
    """Memory of a process, in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return float(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]) / 1024


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("what", choices=("strikes", "seconds", "cost"))
    own.add_argument("--kills", type=int, default=500)
    own.add_argument("--rounds", type=int, default=5)
    own.add_argument("--steps", type=int, default=1000, help="of `cost`")
    own.add_argument("--copies", type=int, default=0, metavar="K", help="of `cost`: steps between copies of `fsdp2`")
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--out", type=Path)
    args = own.parse_args()
    place = Path(tempfile.mkdtemp()).resolve()
    if args.what == "strikes":
        found = strikes(place, args.kills, args.seed, args.out)
    elif args.what == "seconds":
        found = seconds(place, args.rounds, args.seed)
    else:
        found = cost(place, args.rounds, args.steps, args.copies)
    for key, value in found.items():
        if key not in ("each", "rounds", "what was said"):
            print(f"{key}: {value}")
    if args.out and args.what != "strikes":
        keep(args.out, {args.what: found})
    if any(place.glob("job-*")):
        print(f"jobs that ended otherwise: {place}")
    else:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
