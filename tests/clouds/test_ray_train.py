"""Ray Train, really run: two workers on a cluster that Ray starts here; a killed one, a stop, a bad run file."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import plugins
from lockstep.config.errors import BAD
from lockstep.config.run import load
from lockstep_clouds.ray_train import Ray, RayBoard, outcome
from support.command import LOCKSTEP, CommandJob, bits, each_step_once, ended, start_anew, step_of, until, write
from support.harness import TINY, lean
from support.messages import raises
from support.places import TESTS_PATH

LAUNCH = {"name": "ray", "processes": 2, "device": "cpu", "threads": 1}
# every rank is a new interpreter, which finds `held_steps`
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"} | lean()
QUIET["PYTHONPATH"] += f"{os.pathsep}{TESTS_PATH}"


def plan(**launch: Any) -> Any:
    return Ray().plan(load(None, [], TINY | {"launch": LAUNCH | launch}))


def test_the_plan_names_the_arguments_of_ray() -> None:
    made = plan(workers=4, cpus=2, placement="SPREAD", max_restarts=3)
    assert made.processes == 4
    assert "ScalingConfig(num_workers=4, use_gpu=False, resources_per_worker={'CPU': 2}" in made.notes[0]
    assert "placement_strategy='SPREAD'" in made.notes[0]
    assert "FailureConfig(max_failures=3)" in made.notes


def test_too_many_workers() -> None:
    with raises("LS1104", "9", "8"):
        plan(workers=9)


def test_run_file_launches_with_ray() -> None:
    assert "ray" in plugins.names("launchers")
    assert "ray_train" not in plugins.names("launchers")
    assert plugins.find("launchers", "ray") is Ray


def test_one_bad_rank_is_bad_and_a_stop_is_a_stop() -> None:
    assert outcome([0, BAD]) == BAD
    assert outcome([75, 75]) == 75
    assert outcome([0, 0]) == 0
    board = RayBoard()
    board.tell("bad")
    board.tell("stop")
    assert board.status_word() == "bad"


@pytest.mark.processes
def test_no_cluster_at_the_address(job: CommandJob) -> None:
    job.write(launch=LAUNCH | {"address": "127.0.0.1:1"})
    status, out, err = job.train()
    assert status == 2
    assert all(line.startswith(("lockstep  ", "preparing  ")) for line in out.splitlines()), out
    assert "launch.address: no Ray cluster answers at 127.0.0.1:1: 127.0.0.1:1 is not reachable from" in err
    assert "Connection refused" in err


@pytest.mark.processes
def test_without_ray(tmp_path: Path, job: CommandJob) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('not here')\n")
    job.write(launch=LAUNCH)
    status, _, err = job.train(PYTHONPATH=str(tmp_path))
    assert status == 2
    assert "pip install 'lockstep-train[ray]'" in err
    assert len(err.strip().splitlines()) == 1


def ranks(folder: Path) -> list[int]:
    """pids of the ranks of a job that trains in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if (
                entry.name.isdigit()
                and (entry / "cwd").readlink() == folder
                and any(b"main_of_file" in w for w in words)
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


@dataclass(frozen=True)
class Told:
    """Exit status, standard output and standard error of two jobs in a folder."""

    folder: Path
    stopped: tuple[int, str, str]
    finished: tuple[int, str, str]


def begun(folder: Path, cache: Path, hold: int, *overrides: str) -> subprocess.Popen[str]:
    """A job that waits before this step, counted from 0."""
    pytest.importorskip("ray", reason="needs the extra ray")
    if sys.platform != "linux":
        pytest.skip("looks at processes through /proc")
    write(folder, launch=LAUNCH, strategy={"name": "support.waiting_at_steps.Held"})
    (folder / "hold").write_text(str(hold))
    process = start_anew([*LOCKSTEP, "train", "run.yaml", *overrides], folder, cache, **QUIET)
    until(lambda: step_of(folder) >= hold, f"step {hold}", process, seconds=600)
    return process


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Told:
    """Asked to stop; a rank killed and started again. Ray starts a cluster for each of these jobs, which takes longer
    than the training."""
    folder = tmp_path_factory.mktemp("ray")
    process = begun(folder, cache, 5)
    process.send_signal(signal.SIGTERM)
    stopped = ended(process, 600)

    process = begun(folder, cache, 24, "launch.max_restarts=1")
    os.kill(ranks(folder)[-1], signal.SIGKILL)
    (folder / "hold").unlink()
    return Told(folder, stopped, ended(process, 600))


@pytest.mark.cluster
@pytest.mark.extras
@pytest.mark.processes
@pytest.mark.timeout(1800)
class TestRun:
    def test_two_workers_have_the_bits_of_two_processes(self, told: Told, untouched: Path) -> None:
        assert told.finished[0] == 0, told.finished
        assert bits(told.folder) == bits(untouched)
        assert ranks(told.folder) == []

    def test_sigterm_saves_and_the_same_command_resumes(self, told: Told) -> None:
        assert told.stopped[0] == 75, told.stopped
        assert 5 <= resumed(told)[0] < 24  # the ranks agree on a step

    def test_a_killed_rank_is_started_again_and_resumes(self, told: Told, untouched: Path) -> None:
        stop, restarted = resumed(told)
        assert restarted in (stop, 10, 20)  # a checkpoint is written beside the steps, and the one before is there
        each_step_once(told.folder, untouched)

    @pytest.mark.long
    def test_a_killed_rank_without_restarts_is_status_1(self, tmp_path: Path, cache: Path) -> None:
        process = begun(tmp_path, cache, 12)
        os.kill(ranks(tmp_path)[0], signal.SIGKILL)
        status, _, said = ended(process, 600)
        assert status == 1, said
        assert "was killed by signal 9" in said
        until(lambda: ranks(tmp_path) == [], "every rank to end")


def resumed(told: Told) -> list[int]:
    """The steps after which the jobs went on."""
    return [int(step) for step in re.findall(r"resuming after step (\d+)", (told.folder / "out/log.txt").read_text())]
