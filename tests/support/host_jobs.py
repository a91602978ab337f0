"""Shared code of tests on several hosts: a small run, the launcher `torchrun` on a host, holding it at a step."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from support import hosts
from support.checkpoints import digest
from support.command import LOCKSTEP, ended, saved, start, step_of
from support.harness import TINY
from support.hosts import Hosts, Job
from support.places import TESTS_PATH

STEPS, PORT = 24, 29400
SMALL = TINY | {
    "steps": STEPS,
    "output": "out",
    "micro_batches": 4,
    "launch": {"device": "cpu", "threads": 1, "processes": 1, "hang_timeout_s": 0},
    "checkpoint": {"every": 6, "keep": 2},
    "track": {"every": 1},
    "verify": {"plain": False},  # as in `command.RUN`
}
# On a machine with two shared cores a process may get no CPU for six seconds, and would count as lost.
LOST_S = 12
QUICK = [f"launch.keep_alive_timeout_s={LOST_S}", "launch.last_call_timeout_s=3", "launch.max_restarts=3"]
HELD = "strategy.name=support.waiting_at_steps.Held"
CONTINUE = [*QUICK, "strategy.name=support.waiting_at_steps.HeldTogether", "launch.on_rank_failure=continue"]


def write(folder: Path, **values: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(SMALL | values))
    return folder


def bits(folder: Path) -> str:
    """SHA-256 of weights and optimizer state at the end, on any machine."""
    return digest(folder / f"out/checkpoints/step-{STEPS:06d}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> str:
    """Bits of one process on one machine."""
    folder = write(tmp_path_factory.mktemp("alone"))
    status, _, err = ended(start([*LOCKSTEP, "train", "run.yaml"], folder, cache))
    assert status == 0, err
    return bits(folder)


def torchrun(made: Hosts, host: int, *words: str, folder: Path | None = None, machines: str = "2", at: int = 0) -> Job:
    """Start the launcher `torchrun` on a host; it joins the others at host `at`."""
    options = ["launch.name=torchrun", f"launch.machines={machines}", f"launch.rendezvous={made.address(at)}:{PORT}"]
    return made.start(host, [*LOCKSTEP, "train", "run.yaml", *options, *words], folder, PYTHONPATH=TESTS_PATH)


def hold(step: int, *folders: Path) -> None:
    """Hold the jobs of these folders at a step."""
    for folder in folders:
        (folder / "hold.new").write_text(str(step))
        (folder / "hold.new").rename(folder / "hold")


def release(*folders: Path) -> None:
    for folder in folders:
        (folder / "hold").unlink()


def own(made: Hosts) -> list[Path]:
    """Write the run file into every host's own folder."""
    return [write(made.folder(host)) for host in range(made.count)]


def until(true: Callable[[], object], job: Job, seconds: float = 500) -> None:
    """Wait while the job runs. The limit only makes failures end."""
    limit = time.monotonic() + seconds
    while not true():
        assert job.process.poll() is None, f"has ended:\n{job.out}\n{job.err}"
        assert time.monotonic() < limit, f"waited in vain:\n{job.out}\n{job.err}"
        time.sleep(0.05)


def until_step(folder: Path, step: int, job: Job) -> None:
    """Wait until the job has reached a step, and the checkpoint before it is written."""
    until(lambda: step_of(folder) >= step and saved(folder) >= step - step % 6, job)


def begun(
    made: Hosts, *folders: Path, words: list[str] = CONTINUE, machines: str = "1:2", at: int = 0, **more: str
) -> list[Job]:
    """Start a job of two hosts, rank 0 on the first, held at step 8. The second may take minutes to join on a busy
    machine. `more`: an extra word for a host's command, by its name."""
    hold(1, *folders)  # not the dry run before the first step
    own_words = [[more[name]] if (name := f"host_{host}") in more else [] for host in range(2)]
    every = [[*words, f"launch.node_rank={host}", *own_words[host]] for host in range(2)]
    first, second = (
        torchrun(made, host, *every[host], folder=folders[-host], machines=machines, at=at) for host in range(2)
    )
    until(lambda: first.when("machines   2") or regrouped(folders[0]), first)
    hold(8, *folders)
    until(lambda: step_of(folders[0]) >= 8, first)
    return [first, second]


def regrouped(folder: Path) -> list[str]:
    told = folder / "out/events.jsonl"
    lines = told.read_text().splitlines() if told.exists() else []
    return [event["what"] for event in map(json.loads, lines) if event["event"] == "regroup"]


def untouched(folder: Path, *jobs: Job) -> None:
    """Assert that no surviving rank was restarted, and no checkpoint was read."""
    events = (folder / "out/events.jsonl").read_text()
    assert events.count('"event": "start"') == 1
    for job in jobs:
        assert "resuming after step" not in job.out
        assert "restarting" not in job.err


@pytest.fixture
def two(tmp_path: Path, cache: Path) -> Iterator[Hosts]:
    with hosts.hosts(2, tmp_path, cache) as made:
        yield made


@pytest.fixture
def three(tmp_path: Path, cache: Path) -> Iterator[Hosts]:
    with hosts.hosts(3, tmp_path, cache) as made:
        yield made
