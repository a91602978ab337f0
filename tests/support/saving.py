"""Shared code of checkpoint tests: a job of one process, step by step."""

import io
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config.run import Run
from lockstep.data.job import Job as Resolved
from lockstep.distributed import job_record
from lockstep.distributed.world import World
from lockstep.training import hooks, rank
from lockstep.training.data_loader import StepLoader
from lockstep.training.train_state import TrainState
from support.harness import build, digest, tiny

SHARD = "shard-00001-of-00001.safetensors"


def run_in(folder: Path, *overrides: str) -> Run:
    return tiny(f"output={folder}", "strategy.name=single", "launch.processes=1", *overrides)


def job_of(run: Run) -> Resolved:
    """The job that ranks of a run would have, with its data."""
    return Resolved.of(run).with_data()


class Job:
    """One process that trains, as far as checkpoints are concerned."""

    def __init__(self, run: Run) -> None:
        self.run, self.world, self.said = run, World(run), list[str]()
        self.task, self.strategy = build(run, self.world)
        self.feed = StepLoader(self.task, self.strategy.own_micro_batches(), self.world.device)
        self.checkpoints = self.opened(run)
        self.done = 0

    def opened(self, run: Run) -> Checkpoints:
        return Checkpoints(job_of(run), self.world, 6, self.said.append)

    def step(self) -> str:
        """Make a step. Returns a digest of the whole state after it."""
        self.strategy.train_step(self.feed.make(self.done), 5e-3)
        self.done += 1
        return digest(self.strategy.state.state_dict())

    def save(self, **scores: float) -> None:
        self.checkpoints.save(self.done, self.strategy.state, scores)

    def saved(self, **scores: float) -> str:
        """Make a step and its checkpoint."""
        state = self.step()
        self.save(**scores)
        self.checkpoints.settle()
        return state


def here(folder: Path) -> list[str]:
    """Content of a run's folder of checkpoints."""
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


@contextmanager
def disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """Mount a separate disk at `folder`; skips the test if this user may not mount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def trained(run: Run, after: int = 0, event: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Train a whole run in this process as its only rank; after `after` updates, and pending saves, the event happens.
    Returns status and output."""
    real = hooks.SaveInFlight.after_step

    def disturbed(hook: hooks.SaveInFlight, state: TrainState, last: bool) -> bool:
        if state.step == after:
            hook.session.checkpoints.settle()
            event()
        return real(hook, state, last)

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        patch.setattr(hooks.SaveInFlight, "after_step", disturbed)
        run.folder.mkdir(parents=True, exist_ok=True)
        job_record.write(run.folder, job_record.here("local", 1))
        status = rank.main(run)
    return status, " ".join(said.getvalue().split())


def bytes_in(folder: Path) -> dict[str, bytes]:
    """Content of every file, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
