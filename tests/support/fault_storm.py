"""Fault injection: a job that is disturbed while it runs and between starts, and restarted each time.

In: a folder, and a random generator that chooses fault, time and victim; the exact instant depends on the machine. Out:
the faults, the end of each start, and whether the final result is unaffected.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.checkpoint import export_hashes
from lockstep.checkpoint.manifest import Goal, newest_first
from lockstep.config.run import load
from support.command import (
    STEPS,
    bits,
    each_step_once,
    ended,
    environment_of,
    processes_in,
    ranks_of,
    saved,
    step_of,
    until,
    write,
)
from support.forked import Forked
from support.random_kills import STRATEGIES, kill, moment_of, starts_of, wait_for
from support.signalling_strategies import state_of

MOMENTS = ("starting", *["training"] * 4, "saving", "saving", "exporting", "ending")
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
VICTIMS = ("a rank", "the launcher", "all")
HALF = '{"step": 61, "split": "train", "text": "\u2028 caf\u00e9'.encode()[:-1]  # cut within a character
# Statuses of a start that was only asked to stop; the last ones if no handler was installed yet, or Ctrl-C came twice.
ASKED = {0, 1, 75, 130, *(-int(number) for number in STOPS)}
HANG_S, LIMIT_S = 20, 550  # the second is below launch.timeout_s, so that waiting for that counts as a failure


@dataclass
class Record:
    """Number of jobs, faults, and results."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)  # fault -> count
    statuses: Counter[str] = field(default_factory=Counter)  # of disturbed starts
    starts: int = 0
    jobs: int = 0
    lost: int = 0  # jobs whose result differs from an undisturbed one

    def plain(self) -> dict[str, object]:
        kinds: Counter[str] = Counter()
        for name, count in self.faults.items():
            kinds[name.partition(",")[0]] += count
        return {name: getattr(self, name) for name in ("seed", "starts", "jobs", "lost")} | {
            "faults": self.faults.total(),
            "kinds": dict(sorted(kinds.items())),
            "moments": dict(sorted(self.faults.items())),
            "statuses": dict(sorted(self.statuses.items())),
        }


class Job:
    """One job, restarted after every fault. `disk`: whether `folder` is a separate disk."""

    def __init__(self, folder: Path, cache: Path, record: Record, chance: random.Random, disk: bool = False) -> None:
        self.folder, self.out, self.cache, self.record, self.chance = folder, folder / "out", cache, record, chance
        self.disk, self.story = disk, list[str]()
        write(folder, launch={"device": "cpu", "threads": 1, "processes": 2, "hang_timeout_s": HANG_S})

    def done(self, what: str) -> None:
        self.record.faults[what] += 1
        self.story.append(what)

    # -- while it runs -----------------------------------------------------------------------------------------------

    def begun(self, most_bytes: int | None = None) -> Forked:
        processes = self.chance.choice((1, 1, 1, 1, 2, 2, 3))
        strategy = "single" if processes == 1 else self.chance.choice(STRATEGIES)
        options = [f"launch.processes={processes}", f"strategy.name={strategy}"]
        self.record.starts += 1
        self.story.append(f"start {self.record.starts}: {processes} {strategy} {most_bytes or ''}")
        return Forked(["lockstep", "train", "run.yaml", *options], self.folder, environment_of(self.cache), most_bytes)

    def disturbed(self) -> None:
        """One start with up to three faults until it ends."""
        most = 1024 * self.chance.choice((6, 16, 64, 200)) if self.chance.random() < 0.1 else None
        moment, ahead = self.chance.choice(MOMENTS), self.chance.randint(1, 12)
        instant = time.monotonic() + self.chance.random() * 10
        reached, step = starts_of(self.folder), min(saved(self.folder) + ahead, STEPS)
        process = self.begun(most)
        if most:
            self.done("files may not grow")
        kinds = (self._kill, self._stop, self._freeze_one, self._freeze_all, self._fill, self._begin_twice)
        calm, came = most is None, wait_for(moment_of(self.folder, moment, instant, step, reached), process)
        for _ in range(self.chance.randint(1, 3) if came else 0):
            if process.poll() is not None:
                break
            again = not (self.folder / "filler").exists()  # a second start would see the same full disk
            one = 6 * (moment in ("training", "saving") and bool(ranks_of(process, self.folder)))
            kind = self.chance.choices(kinds, (6, 6, one, 1, 2 * self.disk, again))[0]
            calm = calm and kind == self._stop  # a second start may begin after the first, and end differently
            kind(process, moment)
            time.sleep(self.chance.choice((0, 0, 0.05, 0.3, 1.0)))
        else:
            if came and process.poll() is None and self.chance.random() < 0.8:  # otherwise it would run to its end
                time.sleep(self.chance.random() * 2)
                calm = False
                self._kill(process, moment)
        status, out, err = ended(process, LIMIT_S)
        until(lambda: not processes_in(self.folder), "the ranks to end with their launcher")
        (self.folder / "filler").unlink(missing_ok=True)
        self._fits(status, calm, out, err)

    def _fits(self, status: int, calm: bool, out: str, err: str) -> None:
        """Check that a start's status agrees with the files, whatever happened."""
        self.record.statuses[str(status)] += 1
        self.story.append(f"-> {status}; step {step_of(self.folder)}, saved {saved(self.folder)}")
        story = "\n".join([*self.story, out, err])
        if (self.out / "run.yaml").exists():
            run = load(self.out / "run.yaml", {"output": str(self.out)})
            newest = next((found for _, found in newest_first(run.folder)), None)
            assert status != 75 or newest is not None, story
            assert status != 0 or Goal.of(run).met_by(newest), story
        assert status not in (0, 75) or (self.out / "run.yaml").exists(), story
        if calm:
            assert status in ASKED, story
            assert "Traceback" not in out + err, story
        if status in (0, 1, 75) and calm:
            found = state_of(self.folder, self.cache)
            assert (found["state"], found["status"]) == ({0: "done", 1: "failed", 75: "stopped"}[status], status), story

    def _kill(self, process: Forked, moment: str) -> None:
        victim = self.chance.choice(VICTIMS)
        kill(victim, process, self.folder, self.chance)
        self.done(f"kill -9 of {victim}, {moment}")

    def _stop(self, process: Forked, moment: str) -> None:
        number, target = self.chance.choice(STOPS), self.chance.choice(VICTIMS)
        with contextlib.suppress(ProcessLookupError):
            if target == "all":
                os.killpg(process.pid, number)
            else:
                ranks = ranks_of(process, self.folder) or [process.pid]
                os.kill(process.pid if target == "the launcher" else self.chance.choice(ranks), number)
        self.done(f"{number.name} to {target}, {moment}")

    def _freeze_one(self, process: Forked, moment: str) -> None:
        """Freeze a rank permanently. The others detect it, and the start ends."""
        ranks = ranks_of(process, self.folder)
        if not ranks:
            return
        time.sleep(self.chance.random() * 1.5)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.chance.choice(ranks), signal.SIGSTOP)
            self.done(f"a frozen rank, {moment}")
        try:
            process.wait(12 * HANG_S)
        except subprocess.TimeoutExpired:
            raise AssertionError("a frozen rank was not noticed") from None

    def _freeze_all(self, process: Forked, moment: str) -> None:
        """Freeze all ranks for a moment."""
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in [process.pid, *processes_in(self.folder)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.5)
        self.done(f"all frozen and thawed, {moment}")

    def _fill(self, process: Forked, moment: str) -> None:
        """Fill the disk except for a few KiB until the start has ended."""
        with contextlib.suppress(OSError), open(self.folder / "filler", "wb", buffering=0) as file:
            while file.write(bytes(4096)) == 4096:
                pass
        with contextlib.suppress(OSError):
            size = (self.folder / "filler").stat().st_size
            os.truncate(self.folder / "filler", max(0, size - 1024 * self.chance.choice((0, 0, 4, 40, 200))))
        self.done(f"a full disk, {moment}")
        time.sleep(self.chance.random() * 2)

    def _begin_twice(self, process: Forked, moment: str) -> None:
        """Start the same command a second time; it must not disturb the first."""
        status, out, err = ended(
            Forked(["lockstep", "train", "run.yaml"], self.folder, environment_of(self.cache)), LIMIT_S
        )
        assert status == 0 or (status == 2 and "is already in use by a training run" in err), "\n".join(
            [*self.story, out, err]
        )
        self.done("a second start")

    # -- while nothing runs ------------------------------------------------------------------------------------------

    def quietly(self) -> None:
        """Inject one fault between two starts, if there is something to damage."""
        kinds: list[Callable[[], str | None]]
        kinds = [self._tear, self._tear, self._spoil_checkpoint, self._spoil_export, self._spoil_cache, self._forget]
        what = self.chance.choice([*kinds, self._strangers])()
        if what is not None:
            self.done(what)

    def _tear(self) -> str | None:
        """Truncate files as a crash would: half a line cut within a character, a cut record."""
        name = self.chance.choice(("metrics", "samples", "system", "events", "ranks", "launch"))
        path = self.out / f"{name}.{'json' if name == 'launch' else 'jsonl'}"
        if not path.exists() or not path.stat().st_size:
            return None
        if name == "launch":
            os.truncate(path, self.chance.randrange(path.stat().st_size))
        else:
            with open(path, "ab") as file:
                file.write(HALF)
        return f"torn {path.name}"

    def _spoil_checkpoint(self) -> str | None:
        """Damage the newest checkpoint, if there is another; not that of a finished run, which is never read."""
        if (self.out / "export").is_dir():
            return None
        found = sorted((self.out / "checkpoints").glob("step-??????"))
        if len(found) < 2 or not (files := sorted(path for path in found[-1].iterdir() if path.is_file())):
            return None
        return f"a damaged checkpoint, {self._damage(self.chance.choice(files))}"

    def _spoil_export(self) -> str | None:
        path = self.out / "export" / self.chance.choice(("model.safetensors", "tokenizer.json"))
        return f"a damaged export, {self._damage(path)}" if path.exists() else None

    def _spoil_cache(self) -> str | None:
        found = sorted(p for part in ("tokens", "prepared", "tokenizers") for p in (self.cache / part).rglob("*"))
        files = [path for path in found if path.is_file()]
        return f"a damaged token cache, {self._damage(self.chance.choice(files))}" if files else None

    def _forget(self) -> str | None:
        name = self.chance.choice(("launch.json", "export.json", "report.html", "checkpoints/latest", ".lock"))
        if not os.path.lexists(self.out / name):
            return None
        (self.out / name).unlink()
        return f"a deleted file, {name}"

    def _strangers(self) -> str | None:
        """Put foreign files everywhere."""
        for folder in (self.out, self.out / "checkpoints", *self.out.glob("checkpoints/step-*"), self.out / "export"):
            if folder.is_dir():
                for name in (".DS_Store", "._shard-00001-of-00002.safetensors", "notes.txt"):
                    (folder / name).write_bytes(self.chance.randbytes(20))
        return "files of others" if self.out.is_dir() else None

    def _damage(self, path: Path) -> str:
        content = bytearray(path.read_bytes())
        if not content or self.chance.random() < 0.3:
            path.unlink()
            return "deleted"
        if self.chance.random() < 0.5:
            os.truncate(path, self.chance.randrange(len(content)))
            return "cut"
        content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
        path.write_bytes(content)
        return "a bit"

    # -- result ------------------------------------------------------------------------------------------------------

    def as_if_nothing_had_been(self, untouched: Path) -> None:
        """Assert that one more start ends like an undisturbed job, and another one changes nothing."""
        for _ in range(2):
            self.record.starts += 1
            last = Forked(
                ["lockstep", "train", "run.yaml", "launch.processes=1"], self.folder, environment_of(self.cache)
            )
            status, out, err = ended(last, LIMIT_S)
            assert status == 0, (out, err)
        assert bits(self.folder) == bits(untouched)
        each_step_once(self.folder, untouched)
        assert export_hashes.damage(self.out) is None
        found = state_of(self.folder, self.cache)
        assert (found["state"], found["status"], found["finished"]) == ("done", 0, True)
        assert not (self.out / ".lock").exists()
        assert not list(self.out.rglob(".*.partial"))
        assert not list(self.out.glob(".export.*"))
        missing = {p.name for p in (untouched / "out").iterdir()} - {p.name for p in self.out.iterdir()}
        assert not missing
