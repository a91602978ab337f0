"""Jobs whose ranks are killed repeatedly while the others continue: the kills, and the results.

In: a seed. Out: a world, a strategy and a list of strikes (`self_killing_strategies.py`), carried out; bits and lines
must equal those of an undisturbed job.
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

VALUES = {"micro_batches": 8, "steps": 60}  # long enough for a late strike to meet an evaluation or a checkpoint
SHORT = {"micro_batches": 4, "steps": 20}  # for jobs with one or two strikes at chosen steps
KINDS = ("StruckAllReduce", "StruckDDP")


@dataclass
class Job:
    """One job and its strikes."""

    seed: int
    strategy: str
    world: int
    strikes: list[dict] = field(default_factory=list)  # planned
    done: list[dict] = field(default_factory=list)
    restarted: int = 0  # times all ranks were started again
    equal: bool = False  # full restarts

    def plain(self) -> dict:
        return asdict(self)


def job_of(strategy: str, world: int, *strikes: tuple[int, int, str, int], saved: int = 0) -> Job:
    """A strike (step, rank, phase, minimum world size), once the checkpoint of step `saved` exists."""
    names = ("step", "rank", "phase", "world")
    return Job(0, strategy, world, [dict(zip(names, each, strict=True)) | {"saved": saved} for each in strikes])


def untouched(folder: Path, cache: Path, *words: str, values: dict[str, int] = SHORT) -> Path:
    """An undisturbed job to compare with."""
    write(folder, **values)
    finish(folder, cache, "launch.processes=1", "strategy.name=single", *words)
    return folder


def draw_job(seed: int, count: int, steps: int, kinds: tuple[str, ...] = KINDS) -> Job:
    """Draw a job of `count` strikes, half of them where ranks depend on each other; the others can continue after each.

    Strikes during the rendezvous follow a loss in a full world of at least three, so that others hold the state. There
    are none after the last step, where a loss restarts everything; evaluations and checkpoints are struck before it.
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
        step -= -step % -every  # the step at which it occurs
        room = steps - 2 - step >= left and step < steps - 1
        if not room or (phase == "joining" and not job.strikes) or (meets and (world == 2 or left == 1)):
            continue
        if meets:
            before = chance.choice(("step", "forward", "gradient", *EXCHANGE))
            job.strikes.append({"step": step, "rank": chance.randint(0, 5), "phase": before, "world": world})
        full = chance.random() < 0.5 and not meets and steps - step > 3 * world  # each replacement takes steps to join
        most = world if full else 2  # strike a full world, or any survivor
        due = max(1, step - 5) if every > 1 else step  # ranks may have to be waited for
        job.strikes.append({"step": due, "rank": chance.randint(0, 5), "phase": phase, "world": most})
        now = step + 1
    return job


def carried_out(job: Job, folder: Path, cache: Path, untouched: Path, *words: str, replaced: int = 100) -> Job:
    """Run the job to its end. Errors: AssertionError with its output if it ends otherwise than `untouched`."""
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
    """Run the job to its end, and return its output. Errors: AssertionError if its status is not 0."""
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
