"""Random faults at random moments, one after another: processes killed, disks that are full, files torn and damaged,
files of others, a second start. In the end all is as if nobody had disturbed the job.

`LOCKSTEP_SEED=2 LOCKSTEP_FAULTS=100 LOCKSTEP_RECORD=record.json pytest -m long tests/test_fault_storm.py -s` chooses
other faults, and keeps what was done. Requests to stop are in test_signal_storm.py.
"""

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command import (
    LOCKSTEP,
    STEPS,
    bits,
    each_step_once,
    ended,
    processes_in,
    saved,
    start,
    step_of,
    train,
    until,
    write,
)
from killing import STRATEGIES, VICTIMS, kill, moment_of, starts_of, wait_for

from lockstep.checkpoint import exported
from lockstep.processes import launched

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
    pytest.mark.long,
    pytest.mark.timeout(6 * 3600),
]
MOMENTS = ("starting", "training", "saving", "exporting", "ending")
HALF = '{"step": 61, "split": "train", "text": "\u2028 caf\u00e9'.encode()[:-1]  # in the middle of a character


@dataclass
class Record:
    """What was done to how many jobs, and what came of it."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)  # what, and how often
    starts: int = 0
    jobs: int = 0
    lost: int = 0  # jobs that ended otherwise than one that nobody touched

    def plain(self) -> dict:
        return {name: getattr(self, name) for name in ("seed", "starts", "jobs", "lost")} | {
            "faults": dict(sorted(self.faults.items()))
        }


class Job:
    """One job, which is started again after every fault."""

    def __init__(self, folder: Path, cache: Path, record: Record, chance: random.Random) -> None:
        self.folder, self.out, self.cache, self.record, self.chance = folder, folder / "out", cache, record, chance
        write(folder)

    # -- while it runs -----------------------------------------------------------------------------------------------

    def begun(self, *before: str):
        processes = self.chance.randint(1, 3)
        strategy = "single" if processes == 1 else self.chance.choice(STRATEGIES)
        options = [f"launch.processes={processes}", f"strategy.name={strategy}"]
        self.record.starts += 1
        return start([*before, *LOCKSTEP, "train", "run.yaml", *options], self.folder, self.cache)

    def killed(self, *before: str) -> str:
        """kill -9, of a rank, the launcher or all."""
        moment, victim = self.chance.choice(MOMENTS), self.chance.choice(VICTIMS)
        instant = time.monotonic() + self.chance.random() * 10
        reached, step = starts_of(self.folder), min(saved(self.folder) + self.chance.randint(1, 25), STEPS)
        process = self.begun(*before)
        if wait_for(moment_of(self.folder, moment, instant, step, reached), process):
            kill(victim, process, self.folder, self.chance)
        else:
            moment = "not at all"
        status, out, err = ended(process)
        assert before or status in (0, -9) or victim == "a rank", (status, out, err)
        until(lambda: not processes_in(self.folder), "the ranks to end with their launcher")
        return f"kill -9 of {victim}, {moment}"

    def on_a_full_disk(self) -> str:
        """No file may grow beyond a size: lines are torn, checkpoints and exports cannot be written; then killed."""
        kib = self.chance.choice((6, 16, 64, 200))
        self.killed("bash", "-c", f'ulimit -f {kib}; exec "$@"', "bash")
        return "a full disk, and kill -9"

    def started_twice(self) -> str:
        """The same command while it runs; the second one must not disturb it."""
        reached, process = starts_of(self.folder), self.begun()
        if wait_for(moment_of(self.folder, self.chance.choice(MOMENTS[:3]), time.monotonic() + 1, 1, reached), process):
            status, out, err = train(self.folder, self.cache)
            assert status == 0 or (status == 2 and "is being trained already" in err), (status, out, err)
        status, out, err = ended(process)
        assert status == 0, (status, out, err)
        return "a second start"

    # -- while nothing runs ------------------------------------------------------------------------------------------

    def torn(self) -> str:
        """Half a line, cut in a character, where a line was being written; a record that was cut."""
        name = self.chance.choice(("metrics", "samples", "system", "events", "ranks", "launch"))
        path = self.out / f"{name}.{'json' if name == 'launch' else 'jsonl'}"
        if path.exists() and name == "launch":
            os.truncate(path, self.chance.randrange(path.stat().st_size))
        elif path.exists():
            with open(path, "ab") as file:
                file.write(HALF)
        return f"torn {path.name}"

    def damaged_checkpoint(self) -> str:
        """The newest one, where there is another."""
        found = sorted((self.out / "checkpoints").glob("step-*"))
        if len(found) > 1:
            self._damage(self.chance.choice([path for path in found[-1].iterdir() if path.is_file()]))
        return "a damaged checkpoint"

    def damaged_export(self) -> str:
        if (self.out / "export").is_dir():
            self._damage(self.out / "export" / self.chance.choice(("model.safetensors", "tokenizer.json")))
        return "a damaged export"

    def strangers(self) -> str:
        """Files of others, everywhere."""
        for folder in (self.out, self.out / "checkpoints", *self.out.glob("checkpoints/step-*"), self.out / "export"):
            if folder.is_dir():
                for name in (".DS_Store", "._shard-00001-of-00002.safetensors", "notes.txt"):
                    (folder / name).write_bytes(self.chance.randbytes(20))
        return "files of others"

    def _damage(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        if not content or self.chance.random() < 0.3:
            path.unlink()
        elif self.chance.random() < 0.5:
            os.truncate(path, self.chance.randrange(len(content)))
        else:
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
            path.write_bytes(content)

    # -- and then ----------------------------------------------------------------------------------------------------

    def as_if_nothing_had_been(self, untouched: Path) -> None:
        """Started once more, it ends as one that nobody touched."""
        self.record.starts += 1
        status, out, err = train(self.folder, self.cache)
        assert status == 0, (out, err)
        assert bits(self.folder) == bits(untouched)
        each_step_once(self.folder, untouched)
        assert step_of(self.folder) == STEPS
        assert exported.damage(self.out) is None
        found = launched.read(self.out)
        assert found is not None
        assert found.status == 0
        assert not (self.out / ".lock").exists()
        assert not list(self.out.glob(".export.*"))


def test_a_storm_of_faults(tmp_path: Path, cache: Path, untouched: Path) -> None:
    seed = int(os.environ.get("LOCKSTEP_SEED", 1))
    wanted = int(os.environ.get("LOCKSTEP_FAULTS", 40))
    print(f"LOCKSTEP_SEED={seed} LOCKSTEP_FAULTS={wanted}")
    record, chance = Record(seed), random.Random(seed)
    while record.faults.total() < wanted:
        job = Job(tmp_path / f"job-{record.jobs}", cache, record, chance)
        kinds: list[Callable[[], str]] = [job.killed, job.on_a_full_disk, job.started_twice, job.torn]
        kinds += [job.damaged_checkpoint, job.damaged_export, job.strangers]
        try:
            for kind in chance.choices(kinds, (8, 3, 1, 3, 3, 2, 2), k=min(8, wanted - record.faults.total())):
                what = kind()
                record.faults[what] += 1
                print(f"job {record.jobs}: {what}; step {step_of(job.folder)}, saved {saved(job.folder)}", flush=True)
            job.as_if_nothing_had_been(untouched)
        except AssertionError as error:
            record.lost += 1
            raise AssertionError(f"job {record.jobs}: {record.plain()}") from error
        record.jobs += 1
    if path := os.environ.get("LOCKSTEP_RECORD"):
        Path(path).write_text(json.dumps(record.plain(), indent=1))
