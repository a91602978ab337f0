"""Ranks that are killed while they train, hundreds of times, and what it costs: `launch.on_loss: continue`.

In: how many kills, from which seed. Out: a table, and everything as JSON in --out. `strikes`: jobs of 2 to 6 ranks that
kill themselves in random phases of random steps (tests/struck.py), until so many are dead; each job has to end
with the bits and the lines of one that nobody touched. `seconds`: from kill -9 of a random rank to the next finished
step, and how many steps are trained again, `continue` and `restart` by turns. `cost`: processor seconds a step of a job
that nobody touches, with and without the key, by turns.
Example: python benchmarks/faults.py strikes --kills 500 --out benchmarks/results/faults.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import striking
from command import LOCKSTEP, Process, finish, lines, processes_in, ranks_of, start, step_of, until, write
from run import processor
from struck import EXCHANGE


def strikes(place: Path, kills: int, seed: int) -> dict:
    """Jobs of a dozen strikes each, until there were so many."""
    cache, untouched, jobs, lost = place / "cache", place / "untouched", [], []
    write(untouched, **striking.VALUES)
    finish(untouched, cache, "launch.processes=1", "strategy.name=single")
    while sum(len(job.done) for job in jobs) < kills:
        job = striking.drawn(seed + len(jobs), 12, striking.VALUES["steps"])
        try:
            striking.carried_out(job, place / "job", cache, untouched)
        except AssertionError as error:
            lost.append(str(error))
        jobs.append(job)
        done = Counter(each["phase"] for each in job.done)
        print(job.seed, job.strategy, job.world, dict(done), f"restarted {job.restarted}", job.equal, flush=True)
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


def seconds(place: Path, rounds: int, seed: int) -> dict:
    """Kill a random rank at a random moment; every 20 steps there is a checkpoint."""
    chance, found = random.Random(seed), {}
    for number in range(2 * rounds):
        how = ("continue", "restart", "restart", "continue")[number % 4]
        found.setdefault(how, []).append(killed(place / f"timed-{number}", place / "cache", how, chance))
    medians = {
        how: {key: statistics.median(each[key] for each in rows) for key in rows[0]} for how, rows in found.items()
    }
    return {"medians": medians, "rounds": found, "seed": seed}


def killed(folder: Path, cache: Path, how: str, chance: random.Random) -> dict[str, float]:
    """From a kill to the next finished step."""
    write(folder, steps=100_000, evaluate={"every": 0}, checkpoint={"every": 20}, optim={"schedule": "constant"})
    options = [f"launch.on_loss={how}", "launch.max_restarts=100", "launch.processes=3", "strategy.name=allreduce"]
    process = start([*LOCKSTEP, "train", "run.yaml", *options], folder, cache)
    wanted = 25 + chance.randint(0, 20)
    until(lambda: step_of(folder) >= wanted, "some steps", process)
    time.sleep(chance.random() * 0.1)
    trained, began = step_of(folder), time.monotonic()
    os.kill(chance.choice(ranks_of(process, folder)), signal.SIGKILL)
    events = folder / "out" / "events.jsonl"
    sign, before = ('"event": "regroup"', 0) if how == "continue" else ('"event": "start"', 1)
    until(lambda: events.read_text().count(sign) > before, "the ranks to go on", process)
    at = json.loads([line for line in events.read_text().splitlines() if sign in line][before])["step"]
    until(lambda: any(line["step"] > at for line in lines(folder)[-1:]), "a step", process)
    took = time.monotonic() - began
    end(process, folder)
    return {"seconds": took, "steps trained again": max(0, trained - at)}


def end(process: Process, folder: Path) -> None:
    """All of a job's processes."""
    for pid in [process.pid, *processes_in(folder)]:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()
    until(lambda: not processes_in(folder), "the ranks to end")


def used(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cost(place: Path, rounds: int, steps: int) -> dict:
    """Of both ranks together, a step; jobs of one kind after jobs of the other."""
    found: dict[str, list[float]] = {"restart": [], "continue": []}
    for number in range(2 * rounds):
        how = ("restart", "continue", "continue", "restart")[number % 4]
        found[how].append(spent(place / f"cost-{number}", place / "cache", how, steps))
    medians = {how: statistics.median(values) for how, values in found.items()}
    return {"processor seconds a step": medians, "ratio": medians["continue"] / medians["restart"], "rounds": found}


def spent(folder: Path, cache: Path, how: str, steps: int) -> float:
    """Processor seconds a step of a job that nobody touches."""
    write(folder, steps=steps + 200, evaluate={"every": 0}, checkpoint={"every": 0}, track={"every": 10})
    options = [f"launch.on_loss={how}", "launch.processes=2", "strategy.name=allreduce"]
    process = start([*LOCKSTEP, "train", "run.yaml", *options], folder, cache)
    until(lambda: step_of(folder) >= 20, "some steps", process)
    ranks, first = ranks_of(process, folder), step_of(folder)
    before = sum(map(used, ranks))
    until(lambda: step_of(folder) >= steps, "more steps", process, 600)
    found = (sum(map(used, ranks)) - before) / (step_of(folder) - first)
    end(process, folder)
    return found


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("what", choices=("strikes", "seconds", "cost"))
    own.add_argument("--kills", type=int, default=500)
    own.add_argument("--rounds", type=int, default=5)
    own.add_argument("--steps", type=int, default=1000, help="of `cost`")
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--out", type=Path)
    args = own.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name).resolve()
        if args.what == "strikes":
            found = strikes(place, args.kills, args.seed)
        else:
            found = (
                seconds(place, args.rounds, args.seed)
                if args.what == "seconds"
                else cost(place, args.rounds, args.steps)
            )
    for key, value in found.items():
        if key not in ("each", "rounds", "what was said"):
            print(f"{key}: {value}")
    if args.out:
        args.out.write_text(json.dumps({"processor": processor(), args.what: found}, indent=1))


if __name__ == "__main__":
    main()
