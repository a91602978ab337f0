"""A cache folder in which several machines prepare the same data at once, with locks that do not reach each other: one
works, a silent one is replaced, its finished shards are kept, and one that wakes up again does no harm.

A machine is a process here, with its own name and its own encoding processes.
"""

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from lockstep.data import arrow_cache, cache
from lockstep.data.cache import damage
from support.caches import prepared, token_rows
from support.harness import tiny

pytestmark = pytest.mark.processes
STILL_S = 3.0  # after which a machine counts as dead
Made = Callable[[Path], None]


def no_lock(*_: Any) -> NoReturn:
    raise OSError(errno.ENOLCK, "no locks available")


class Machines:
    """Start machines, and record which shards each wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pids = folder, {}  # type: ignore[var-annotated]

    def start(self, name: str, before: Made = lambda path: None) -> int:
        """Prepare the data in a process; `before` is called there with each shard's path, while it is being written."""
        if (pid := os.fork()) == 0:
            try:
                found = self._prepare(name, before)
                (self.folder / f"{name}.json").write_text(json.dumps(found))
                os._exit(0)
            finally:
                os._exit(1)
        self.pids[name] = pid
        return pid

    def _prepare(self, name: str, before: Made) -> dict[str, Any]:
        whole = arrow_cache.placed

        def placed(path: Path, do: Callable[[Path], None]) -> None:
            with open(self.folder / f"{name}.made", "a") as log:
                log.write(f"{path.name} of {path.parent.name}\n")

            def made(aside: Path) -> None:
                before(path)
                do(aside)

            whole(path, made)

        with pytest.MonkeyPatch.context() as patch:
            for key, value in {"ROWS": 10, "AT_ONCE": 5, "available_cores": lambda: 2, "placed": placed}.items():
                patch.setattr(arrow_cache, key, value)
            flock = SimpleNamespace(flock=no_lock, LOCK_EX=0)
            for key, value in {"machine": lambda: name, "fcntl": flock, "BEAT_S": 0.1, "SILENCE_S": STILL_S}.items():
                patch.setattr(cache, key, value)
            found = prepared(tiny())
            return {"tokens": token_rows(found), "key": found.key, "place": found.splits["train"]}

    def made(self, name: str) -> list[str]:
        path = self.folder / f"{name}.made"
        return path.read_text().splitlines() if path.exists() else []

    def end(self, name: str) -> int:
        """Return the exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pids.pop(name), 0)[1])

    def found(self, name: str) -> dict[str, Any]:
        assert self.end(name) == 0
        found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return found


def until(true: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.02)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    found = Machines(tmp_path)
    yield found
    for pid in found.pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The data that one machine prepares in a separate cache."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CACHE", str(folder / "cache"))
        machine = Machines(folder)
        machine.start("alone")
        return machine.found("alone")


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert {k: found[k] for k in ("tokens", "key")} == {k: wanted[k] for k in ("tokens", "key")}
    assert damage(Path(found["place"])) is None


def test_two_machines_build_each_shard_once(machines: Machines, alone: dict[str, Any]) -> None:
    machines.start("a", lambda path: time.sleep(0.05))
    machines.start("b", lambda path: time.sleep(0.05))
    for name in ("a", "b"):
        same(machines.found(name), alone)
    made = machines.made("a") + machines.made("b")
    assert len(made) == len(set(made)) == len(list(Path(alone["place"]).parent.rglob("*.arrow/*.arrow")))


def test_a_killed_machine_is_replaced_and_its_shards_are_kept(machines: Machines, alone: dict[str, Any]) -> None:
    def stop_at_five(path: Path) -> None:
        if path.name == "00005.arrow":
            time.sleep(600)

    machines.start("a", stop_at_five)
    until(lambda: len(machines.made("a")) >= 4)
    machines.start("b")
    [folder] = (machines.folder / "cache" / "tokens").rglob("*.parts")
    os.kill(machines.pids["a"], signal.SIGKILL)
    assert machines.end("a") == -signal.SIGKILL
    kept = {path.name: path.stat().st_ino for path in folder.glob("*.arrow") if damage(path) is None}
    assert len(kept) >= 3
    found = machines.found("b")
    same(found, alone)
    now = {path.name: path.stat().st_ino for path in Path(found["place"]).glob("*.arrow")}
    assert kept.items() <= now.items()
    of_train = [line.split()[0] for line in machines.made("b") if Path(found["place"]).name in line]
    assert not kept.keys() & set(of_train), "what was there was made again"


def test_a_machine_that_wakes_up_after_its_replacement_does_no_harm(machines: Machines, alone: dict[str, Any]) -> None:
    def wait_at_five(path: Path) -> None:
        if path.name == "00005.arrow":
            until((machines.folder / "go").exists, 600)

    first = machines.start("a", wait_at_five)
    until(lambda: len(machines.made("a")) >= 4)
    os.kill(first, signal.SIGSTOP)  # its heartbeat stops, too
    machines.start("b")
    found = machines.found("b")
    same(found, alone)
    (machines.folder / "go").touch()
    os.kill(first, signal.SIGCONT)
    same(machines.found("a"), alone)
    same(found, alone)  # what the other has read is unchanged
    left = [path for ending in ("lease", "parts", "tmp") for path in (machines.folder / "cache").rglob(f"*.{ending}")]
    assert left == []
