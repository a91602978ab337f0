"""After random signals at random moments, the exit status agrees with the files on disk, and the final results equal
those of an undisturbed job."""

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from lockstep.checkpoint.manifest import Goal, newest_first
from lockstep.config.run import load
from support.command import (
    LOCKSTEP,
    STEPS,
    bits,
    each_step_once,
    ended,
    finish,
    processes_in,
    ranks_of,
    start_anew,
    step_of,
    until,
    write,
)
from support.signalling_strategies import state_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
]
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
TARGETS = ("the launcher", "a rank", "all")
SPARSE = {"track": {"every": 7}, "evaluate": {"every": 20}, "checkpoint": {"every": 15, "keep": 2}}


def fault(process, folder: Path, chance: random.Random) -> str:
    """Send one signal now, mostly a stop request, else kill -9; return a description."""
    number = signal.SIGKILL if chance.random() < 0.25 else chance.choice(STOPS)
    target = chance.choice(TARGETS)
    ranks = ranks_of(process, folder) or [process.pid]
    victims = {"the launcher": [process.pid], "a rank": [chance.choice(ranks)]}.get(target)
    with contextlib.suppress(ProcessLookupError):
        if victims is None and number != signal.SIGKILL:
            os.killpg(process.pid, number)
        for victim in victims or (list(processes_in(folder)) if number == signal.SIGKILL else []):
            os.kill(victim, number)
    return f"{number.name} to {target}"


def moment(process, folder: Path, chance: random.Random) -> str:
    """Wait for a moment: a step, the last step, the export, or some time after it."""
    out = folder / "out"
    began = step_of(folder)
    step = min(STEPS, began + chance.randint(1, 30))
    come = {
        "at a step": lambda: step_of(folder) >= step,
        "after the last step": lambda: step_of(folder) >= STEPS,
        "at the export": lambda: (out / ".export.partial").exists() or (out / "export").exists(),
        "at the end": lambda: (out / "report.html").exists(),
    }
    name = chance.choice(list(come))
    while process.poll() is None and not come[name]():
        time.sleep(0.005)
    time.sleep(chance.choice((0, 0, 0.05, 0.3, 1.0)))
    return name


def storm(folder: Path, cache: Path, untouched: Path, seed: int, faults: int) -> list[str]:
    """Run one job with faults, and return their descriptions. Errors: AssertionError with these."""
    chance, done = random.Random(seed), []
    write(folder, **SPARSE)
    for _ in range(faults):
        processes = chance.randint(1, 4)
        process = start_anew([*LOCKSTEP, "train", "run.yaml", f"launch.processes={processes}"], folder, cache)
        when = moment(process, folder, chance)
        done.append(f"{processes} ranks, {when}: {fault(process, folder, chance)}")
        status, out, err = ended(process)  # within 200 s; launch.timeout_s is three times that
        done[-1] += f" -> {status}"
        until(lambda: not processes_in(folder), "the ranks to end with their launcher")
        run = load(folder / "out" / "run.yaml", {"output": str(folder / "out")})
        newest = next((m for _, m in newest_first(run.folder)), None)
        story = "\n".join([*done, out, err])
        assert status != 75 or newest is not None, story
        assert status != 0 or Goal.of(run).met_by(newest), story
        found = state_of(folder, cache)
        if status in (0, 1, 75):
            word = {0: "done", 1: "failed", 75: "stopped"}[status]
            assert (found["state"], found["status"]) == (word, status), story
        if "SIGKILL" not in done[-1]:
            assert status in (0, 75, 1, 130, -1, -2, -15, -10), story
            assert "Traceback" not in out + err, story
    for _ in range(2):
        finish(folder, cache, f"launch.processes={chance.randint(1, 4)}")
    found = state_of(folder, cache)
    story = "\n".join(done)
    assert (found["state"], found["status"], found["finished"]) == ("done", 0, True), story
    assert not list((folder / "out").rglob(".*.partial")), story
    assert {p.name for p in (folder / "out").iterdir()} == {p.name for p in (untouched / "out").iterdir()}, story
    record = json.loads((folder / "out" / "launch.json").read_text())
    assert (record["launcher"], record["steps"]) == ("local", STEPS), story
    assert bits(folder) == bits(untouched), story
    each_step_once(folder, untouched)
    return done


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    write(folder, **SPARSE)
    finish(folder, cache)
    return folder


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_storm_of_signals(tmp_path: Path, cache: Path, sparse: Path) -> None:
    """LOCKSTEP_SEED chooses other storms, LOCKSTEP_JOBS the number of jobs; LOCKSTEP_RECORD=FILE records the faults."""
    first, jobs = int(os.environ.get("LOCKSTEP_SEED", 1)), int(os.environ.get("LOCKSTEP_JOBS", 8))
    done = {seed: storm(tmp_path / f"job-{seed}", cache, sparse, seed, 6) for seed in range(first, first + jobs)}
    if path := os.environ.get("LOCKSTEP_RECORD"):
        Path(path).write_text(json.dumps(done, indent=1))
