"""Checkpoints on full and read-only disks, in folders that vanish, and killed while saving. Saving overlaps with
training, which is tested by the order of events, not by a clock."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import shard_files
from lockstep.checkpoint.checkpoint import CheckpointError, Checkpoints
from lockstep.config.run import Run
from lockstep.data.job import Scope
from lockstep.distributed import job_record
from lockstep.distributed.world import World
from lockstep.training.resolve import Machine, resolve
from support.checkpoints import digest as digest_of
from support.command import (
    LOCKSTEP,
    STEPS,
    CommandJob,
    bits,
    ended,
    finish,
    kill,
    processes_in,
    saved,
    start,
    step_of,
    until,
    write,
)
from support.harness import build_with_feed, digest, run_on, tiny
from support.messages import raises
from support.saving import SHARD, Job, disk, here, job_of, run_in

# -- saving during training ------------------------------------------------------------------------------------------


class Gate:
    """A disk whose speed the test controls; it records events in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.events = threading.Event(), list[str]()
        self.begun = threading.Semaphore(0)
        real = shard_files.write

        def slow(path: Path, blocks: Any) -> shard_files.Written:
            if path.name == SHARD:
                self.events.append(f"writing {path.parent.name[6:12]}")
                self.begun.release()
                assert self.open.wait(60)
            written = real(path, blocks)
            self.events.append(f"written {path.name}")
            return written

        monkeypatch.setattr(shard_files, "write", slow)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open.set()


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, gate: Gate) -> None:
    job = Job(run_in(tmp_path / "out"))
    state = job.step()
    job.save()
    assert gate.begun.acquire(timeout=60)
    for _ in range(3):
        job.step()
        job.checkpoints.advance()
    assert gate.events == ["writing 000001"]  # three steps later
    assert [name for name in here(tmp_path / "out") if not name.startswith(".")] == []
    gate.open.set()
    job.checkpoints.settle()
    assert gate.events == ["writing 000001", f"written {SHARD}", "written manifest.json"]
    assert here(tmp_path / "out") == ["latest", "step-000001"]
    assert digest_of(tmp_path / "out/checkpoints/step-000001") == state  # not the state three steps later


def test_without_waiting_a_checkpoint_is_finished_at_a_later_step(tmp_path: Path, gate: Gate) -> None:
    job = Job(run_in(tmp_path / "out"))
    job.step()
    job.save()
    gate.open.set()

    def finished() -> bool:
        job.checkpoints.advance()
        return job.checkpoints.newest == 1

    until(finished, "the checkpoint")
    assert here(tmp_path / "out") == ["latest", "step-000001"]


def test_at_most_one_is_in_flight(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save waits for the previous one, and the end of the run for the last."""
    job = Job(run_in(tmp_path / "out"))
    real = shard_files.Background.wait

    def wait(work: shard_files.Background, seconds: float | None = None) -> None:
        gate.events.append("waiting")
        gate.open.set()  # the first save may be written from here on
        real(work, seconds)

    monkeypatch.setattr(shard_files.Background, "wait", wait)
    first = job.step()
    job.save()
    assert gate.begun.acquire(timeout=60)
    second = job.step()
    assert gate.events == ["writing 000001"]
    job.save()
    assert gate.begun.acquire(timeout=60)
    job.step()
    job.checkpoints.settle()
    events = [e for e in gate.events if e != "waiting"]
    one = [f"written {SHARD}", "written manifest.json"]
    assert events == ["writing 000001", *one, "writing 000002", *one]
    assert gate.events[1] == "waiting"
    for step, state in ((1, first), (2, second)):
        assert digest_of(tmp_path / f"out/checkpoints/step-{step:06d}") == state


# -- failing disks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB, which holds three checkpoints of the tiny model."""
    with disk(tmp_path / "disk", 2048):
        yield tmp_path / "disk"


def on_a_full_disk(world: World, run: Run) -> tuple[list[str], list[str], str, int | None]:
    """Save a checkpoint, one with the disk full, and one after space was freed."""
    _, strategy, feed = build_with_feed(run, world)
    said: list[str] = []
    checkpoints = Checkpoints(job_of(run), world, 6, said.append)
    ballast, left = run.folder.parent / "ballast", ""
    for step in range(3):
        strategy.train_step(feed.make(step), 1e-3)
        if step == 1 and world.is_main:
            with pytest.raises(OSError, match="No space"):
                ballast.write_bytes(bytes(4 * 2**20))
            os.truncate(ballast, ballast.stat().st_size - 2**17)  # room for a part of it
        world.barrier()
        checkpoints.save(step + 1, strategy.state)
        checkpoints.settle()
        if step == 1:
            left = " ".join(here(run.folder))
            world.barrier()
            if world.is_main:
                ballast.unlink()
            world.barrier()
    strategy.close()
    return said, here(run.folder), left, checkpoints.newest


@pytest.mark.processes
@pytest.mark.parametrize(("name", "ranks"), [("ddp", 2), ("fsdp2", 3)])
def test_a_disk_that_fills_during_a_run(name: str, ranks: int, small_disk: Path) -> None:
    run = tiny(f"output={small_disk}/out", f"strategy.name={name}")
    (said, after, left, newest), *others = run_on(ranks, on_a_full_disk, run)
    assert len(said) == 1
    assert "the checkpoint of step 2 could not be written" in said[0]
    assert "No space left on device" in said[0]
    assert "rank " in said[0]
    assert "the newest one is step-000001" in said[0]
    assert left == "latest step-000001"  # no leftovers
    assert after == ["latest", "step-000001", "step-000003"]
    assert newest == 3
    assert all(other[0] == [] and other[3] == 3 for other in others)


@pytest.mark.processes
def test_a_read_only_disk(small_disk: Path) -> None:
    job = Job(run_in(small_disk / "out"))
    state = job.saved()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    job.saved()
    assert len(job.said) == 1
    assert "Read-only file system" in job.said[0]
    assert here(small_disk / "out") == ["latest", "step-000001"]
    assert job.opened(job.run).resume(job.strategy.state) == (1, [])
    assert digest(job.strategy.state.state_dict()) == state


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the link `latest`, a convenience for people, is missing; old checkpoints are deleted, and a run resumes."""

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refused)
    job = Job(run_in(tmp_path / "out", "checkpoint.keep=1"))
    job.saved()
    state = job.saved()
    assert job.said == []
    assert here(tmp_path / "out") == ["step-000002"]
    assert job.opened(job.run).resume(job.strategy.state) == (2, [])
    assert digest(job.strategy.state.state_dict()) == state


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").write_text("mine")
    job = Job(run_in(tmp_path / "out"))
    assert job.checkpoints.resume(job.strategy.state) == (0, [])
    (tmp_path / "out" / "metrics.jsonl").write_text("{}\n")  # of a run that was killed before its first checkpoint
    step, notes = job.checkpoints.resume(job.strategy.state)
    assert (step, len(notes)) == (0, 1)
    assert "has no checkpoint yet, so training starts again from step 0" in notes[0]
    job.saved()
    assert len(job.said) == 1
    assert "there is no earlier checkpoint" in job.said[0]
    assert (tmp_path / "out" / "checkpoints").read_text() == "mine"


@pytest.mark.parametrize("what", ["out", "out/checkpoints", "out/checkpoints/.step-000002.partial"])
def test_a_folder_that_vanishes(what: str, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder vanishes while its checkpoint is being written."""
    job = Job(run_in(tmp_path / "out"))
    gate.open.set()
    job.saved()
    gate.open.clear()
    job.step()
    job.save()
    for _ in range(2):
        assert gate.begun.acquire(timeout=60)
    shutil.rmtree(tmp_path / what)
    gate.open.set()
    job.step()
    job.checkpoints.settle()
    assert len(job.said) == 1
    assert "the checkpoint of step 2 could not be written (rank 0" in job.said[0]
    state = job.saved()
    assert len(job.said) == 1
    assert digest_of(tmp_path / "out/checkpoints/step-000004") == state
    assert job.checkpoints.newest == 4


def one_rank_fails(world: World, run: Run, failing: int) -> tuple[list[str], str | None, list[str], int]:
    _, strategy, feed = build_with_feed(run, world)
    said: list[str] = []
    checkpoints = Checkpoints(job_of(run), world, 6, said.append)
    real, error, step = shard_files.write, None, 0

    def full(path: Path, blocks: Any) -> shard_files.Written:
        if checkpoints.newest == 1 and world.rank == failing and path.name != "manifest.json":
            raise OSError(28, "No space left on device", str(path))
        return real(path, blocks)

    shard_files.write = full
    try:
        for step in range(1, 6):
            strategy.train_step(feed.make(step), 1e-3)
            checkpoints.advance()
            if step < 3:
                checkpoints.save(step, strategy.state)
        checkpoints.settle()
    except CheckpointError as caught:
        error = str(caught)
    shard_files.write = real
    world.barrier()
    strategy.close()
    return said, error, here(run.folder), step


@pytest.mark.processes
@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("then", ["continue", "stop"])
def test_a_rank_that_cannot_write_is_named(then: str, failing: int, tmp_path: Path) -> None:
    run = tiny(f"output={tmp_path}/out", "strategy.name=allreduce", f"checkpoint.on_failure={then}")
    found = run_on(3, one_rank_fails, run, failing)
    (text,) = found[0][0] if then == "continue" else [found[0][1]]
    assert text is not None
    assert "the checkpoint of step 2 could not be written" in text
    assert f"rank {failing} on " in text
    assert "No space left on device" in text
    assert len({error for _, error, _, _ in found}) == 1  # the same on every rank
    assert len({step for *_, step in found}) == 1
    assert all(names == ["latest", "step-000001"] for _, _, names, _ in found)
    if then == "continue":
        assert {step for *_, step in found} == {5}


# -- retention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("best", "scores", "kept"),
    [
        ("accuracy", [0.3, 0.9, 0.5, 0.7, 0.6], [2, 4, 5]),
        ("-loss", [0.3, 0.9, 0.5, 0.7, 0.6], [1, 4, 5]),
        ("accuracy", [0.5, 0.5, 0.5, 0.5, 0.5], [1, 4, 5]),  # of equally good ones, the earliest
        ("accuracy", [0.1, 0.2, 0.3, 0.4, 0.5], [4, 5]),
    ],
)
def test_the_newest_and_the_best_are_kept(best: str, scores: list[float], kept: list[int], tmp_path: Path) -> None:
    run = run_in(tmp_path, f"checkpoint.best={best}", "evaluate.every=1", "checkpoint.keep=2")
    job = Job(run)
    for score in scores:
        job.saved(**{best.removeprefix("-"): score})
    assert here(tmp_path) == ["latest", *(f"step-{step:06d}" for step in kept)]
    sign = -1 if best.startswith("-") else 1
    again = job.opened(run)
    again.resume(job.strategy.state)
    assert again.best == job.checkpoints.best == max(sign * score for score in scores)
    assert again.is_best({best.removeprefix("-"): sign * 2.0})
    assert not again.is_best({best.removeprefix("-"): sign * -2.0})


def test_a_metric_that_does_not_exist_is_named(tmp_path: Path) -> None:
    job = Job(run_in(tmp_path, "checkpoint.best=f1", "evaluate.every=1"))
    with raises("LS6002", "'f1'"):
        job.checkpoints.is_best({"loss": 1.0, "accuracy": 0.1})
    for best in ("f1", "acuracy", "-loss_x"):  # `lockstep plan`, too, names those that there are
        with raises("LS6002", best, "accuracy, ece, examples, loss, macro_f1, roc_auc"):
            resolve(run_in(tmp_path, f"checkpoint.best={best}", "evaluate.every=1"), Machine(), 1)
    with raises("LS6002", "'bleu'", "macro_f1"):  # `lockstep init`, without data
        resolve(run_in(tmp_path, "checkpoint.best=bleu", "evaluate.every=1"), Machine(), 1, Scope.OPTIONS)
    with raises("LS1063"):
        run_in(tmp_path, "checkpoint.best=f1", "evaluate.every=0")


# -- the command -----------------------------------------------------------------------------------------------------

SLOW = """
import os
import time

from lockstep.checkpoint import shard_files
from lockstep.tasks.classification import Classification

real = shard_files.write


def write(path, blocks):
    if os.environ.get("STUCK") == path.parent.name.strip(".").removesuffix(".partial"):
        path.write_bytes(b"half")
        time.sleep(1000)
    return real(path, blocks)


shard_files.write = write


class Slow(Classification):
    pass
"""


def in_the_way(folder: Path) -> None:
    """An output folder of an earlier launch, with a file at the path of its checkpoints."""
    job_record.write(folder, replace(job_record.here("local", 1), status=75))
    (folder / "checkpoints").write_text("mine")


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


@pytest.mark.processes
@on_linux
@pytest.mark.usefixtures("nobody_is_left")
def test_killed_in_the_middle_of_a_save(tmp_path: Path, cache: Path) -> None:
    """The older checkpoint is used, and the partial one is deleted."""
    untouched = tmp_path / "untouched"
    for folder in (tmp_path, untouched):
        write(folder, task={"name": "slow.Slow"}, evaluate={"every": 0})
        (folder / "slow.py").write_text(SLOW)
    finish(untouched, cache)
    process = start([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache, STUCK="step-000020")
    partial = tmp_path / "out/checkpoints/.step-000020.partial"
    until(lambda: len(list(partial.glob("*"))) == 2 and step_of(tmp_path) >= 25, "steps beside a save", process)
    assert saved(tmp_path) == 10
    kill(*processes_in(tmp_path))
    ended(process)
    assert partial.exists()
    assert "resuming after step 10" in finish(tmp_path, cache)
    assert not partial.exists()
    assert bits(tmp_path) == bits(untouched)


@pytest.mark.processes
@on_linux
@pytest.mark.usefixtures("nobody_is_left")
def test_on_failure_stop_ends_with_status_1(tmp_path: Path, job: CommandJob) -> None:
    job.write(checkpoint={"every": 10, "on_failure": "stop"})
    in_the_way(tmp_path / "out")
    status, out, err = job.train()
    assert status == 1, (out, err)
    assert err.count("the checkpoint of step 10 could not be written (rank 0 on ") == 1
    assert "rank 1 on " in err
    assert "Traceback" not in out + err
    assert job.step() < 30


@pytest.mark.processes
@on_linux
@pytest.mark.usefixtures("nobody_is_left")
def test_on_failure_continue_keeps_training_with_a_note(tmp_path: Path, job: CommandJob, untouched: Path) -> None:
    job.write()
    in_the_way(tmp_path / "out")
    assert job.finish().count("could not be written") == STEPS // 10
    export = "out/export/model.safetensors"
    assert (tmp_path / export).read_bytes() == (untouched / export).read_bytes()
