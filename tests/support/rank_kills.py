"""Jobs whose ranks are struck again and again while they train, and go on: what is done to them, and what came of it.

In: a seed. Out: a world, a strategy and a list of strikes (`self_killing_strategies.py`), carried out; the job's bits
and lines are those of one that nobody touched.
"""

import json
import random
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from support.command import LOCKSTEP, RUN, bits, each_step_once, ended, finish, start, write
from support.places import TESTS_PATH
from support.self_killing_strategies import EXCHANGE, PHASES

VALUES = {"micro_batches": 8, "steps": 60}  # a strike that comes late still finds an evaluation or a checkpoint
SHORT = {"micro_batches": 4, "steps": 20}  # of the jobs that are struck once or twice, at chosen steps
KINDS = ("StruckAllReduce", "StruckDDP")


@dataclass
class Job:
    """One job, and what was done to it."""

    seed: int
    strategy: str
    world: int
    strikes: list[dict] = field(default_factory=list)  # planned
    done: list[dict] = field(default_factory=list)
    restarted: int = 0  # times all ranks were started again
    equal: bool = False  # bits, lines and status

    def plain(self) -> dict:
        return asdict(self)


def struck(strategy: str, world: int, *strikes: tuple[int, int, str, int], saved: int = 0) -> Job:
    """Of (step, rank, phase, in a world of so many at least), once the checkpoint of step `saved` is there."""
    names = ("step", "rank", "phase", "world")
    return Job(0, strategy, world, [dict(zip(names, each, strict=True)) | {"saved": saved} for each in strikes])


def untouched(folder: Path, cache: Path, *words: str, values: dict[str, int] = SHORT) -> Path:
    """A job alone, which others that are struck are compared with."""
    write(folder, **values)
    finish(folder, cache, "launch.processes=1", "strategy.name=single", *words)
    return folder


def drawn(seed: int, count: int, steps: int, kinds: tuple[str, ...] = KINDS) -> Job:
    """A job of `count` strikes, half of them where ranks depend on each other; the others can go on after each.

    What is struck while ranks meet comes right after a loss in a full world of three at least: then others hold the
    state. Nothing is struck after the last step, where a loss starts all again: evaluations and checkpoints that are
    struck are those of `RUN` before it.
    """
    chance = random.Random(seed)
    world = chance.randint(2, 6)
    job, now = Job(seed, chance.choice(kinds), world), 1
    while len(job.strikes) < count:
        left = count - len(job.strikes)
        phase = chance.choice(EXCHANGE if chance.random() < 0.5 else PHASES)
        meets = phase in ("forming", "meeting")
        every = {"evaluation": RUN["evaluate"]["every"], "saving": RUN["checkpoint"]["every"]}.get(phase, 1)
        step = now + chance.randint(0, 2 * (steps - 2 - now) // left)
        step -= -step % -every  # at which it comes
        room = steps - 2 - step >= left and step < steps - 1
        if not room or (phase == "joining" and not job.strikes) or (meets and (world == 2 or left == 1)):
            continue
        if meets:
            before = chance.choice(("step", "forward", "gradient", *EXCHANGE))
            job.strikes.append({"step": step, "rank": chance.randint(0, 5), "phase": before, "world": world})
        full = chance.random() < 0.5 and not meets and steps - step > 3 * world  # each one that comes takes steps
        most = world if full else 2  # strike a full world, or whoever is left
        due = max(1, step - 5) if every > 1 else step  # ranks may have to be waited for first
        job.strikes.append({"step": due, "rank": chance.randint(0, 5), "phase": phase, "world": most})
        now = step + 1
    return job


def carried_out(job: Job, folder: Path, cache: Path, untouched: Path, *words: str, replaced: int = 100) -> Job:
    """The job, to its end. Errors: AssertionError with what it said when it ends otherwise than `untouched`, whose run
    it is."""
    said = ended_after(job, folder, cache, untouched, *words, replaced=replaced)
    steps = yaml.safe_load((folder / "run.yaml").read_text())["steps"]
    assert bits(folder, steps) == bits(untouched, steps), said
    try:
        each_step_once(folder, untouched)
    except AssertionError as error:
        raise AssertionError(said) from error
    job.equal = True
    return job


def ended_after(
    job: Job, folder: Path, cache: Path, untouched: Path, *words: str, replaced: int = 100
) -> tuple[dict, str, str]:
    """The job, to its end, and what it said. Errors: AssertionError where its status is not 0."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(untouched / "run.yaml", folder)
    (folder / "strikes.json").write_text(json.dumps(job.strikes))
    options = [
        f"strategy.name=support.self_killing_strategies.{job.strategy}",
        "launch.on_rank_failure=continue",
        f"launch.max_restarts={replaced}",
    ]
    options += [f"launch.processes={job.world}", *words]
    status, out, err = ended(
        start([*LOCKSTEP, "train", "run.yaml", *options], folder, cache, PYTHONPATH=TESTS_PATH), 900
    )
    found = sorted(folder.glob("struck-*"), key=lambda path: int(path.name[7:]))
    job.done = [json.loads(path.read_text()) for path in found]
    job.restarted = (folder / "out/events.jsonl").read_text().count('"event": "start"') - 1
    assert status == 0, (job.plain(), out[-4000:], err[-6000:])
    return job.plain(), out[-4000:], err[-6000:]
