"""Ray Train, really run: two workers on a cluster that Ray starts here; a killed one, a stop, a bad run file."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from command import LOCKSTEP, STEPS, bits, finish, lines, saved, start_anew, step_of, train, until, write
from harness import TINY, lean

from lockstep.config import plugins
from lockstep.config.exit_status import BAD
from lockstep.config.run import RunError, load
from lockstep.launchers.ray_train import Board, Ray, outcome

LAUNCH = {"name": "ray", "processes": 2, "device": "cpu", "threads": 1}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"} | lean()  # every rank is a new interpreter


def plan(**launch: Any) -> Any:
    return Ray().plan(load(None, [], TINY | {"launch": LAUNCH | launch}))


def test_the_plan_names_what_ray_is_asked_for() -> None:
    made = plan(workers=4, cpus=2, placement="SPREAD", max_restarts=3)
    assert made.processes == 4
    assert "ScalingConfig(num_workers=4, use_gpu=False, resources_per_worker={'CPU': 2}" in made.notes[0]
    assert "placement_strategy='SPREAD'" in made.notes[0]
    assert "FailureConfig(max_failures=3)" in made.notes


def test_too_many_workers() -> None:
    with pytest.raises(RunError, match="9 workers cannot share 8 micro-batches"):
        plan(workers=9)


def test_the_run_file_says_ray() -> None:
    assert "ray" in plugins.names("launchers")
    assert "ray_train" not in plugins.names("launchers")
    assert plugins.find("launchers", "ray") is Ray


def test_one_bad_rank_is_bad_and_a_stop_is_a_stop() -> None:
    assert outcome([0, BAD]) == BAD
    assert outcome([75, 75]) == 75
    assert outcome([0, 0]) == 0
    board = Board()
    board.tell("bad")
    board.tell("stop")
    assert board.asked() == "bad"


@pytest.mark.processes
def test_no_cluster_at_the_address(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, launch=LAUNCH | {"address": "127.0.0.1:1"})
    status, out, err = train(tmp_path, cache)
    assert status == 2
    assert all(line.startswith(("lockstep  ", "preparing  ")) for line in out.splitlines()), out
    assert "launch.address: no Ray cluster answers at 127.0.0.1:1: 127.0.0.1:1 could not be reached from" in err
    assert "Connection refused" in err


@pytest.mark.processes
def test_without_ray(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('not here')\n")
    write(tmp_path, launch=LAUNCH)
    status, _, err = train(tmp_path, cache, PYTHONPATH=str(tmp_path))
    assert status == 2
    assert "pip install 'lockstep-train[ray]'" in err
    assert len(err.strip().splitlines()) == 1


@pytest.fixture
def ray() -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    if sys.platform != "linux":
        pytest.skip("looks at processes through /proc")


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


@pytest.mark.cluster
@pytest.mark.extras
@pytest.mark.processes
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("ray")
class TestRun:
    def test_two_workers_have_the_bits_of_two_processes(self, tmp_path: Path, cache: Path, untouched: Path) -> None:
        write(tmp_path, launch=LAUNCH)
        process = start_anew([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache, **QUIET)
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, (out, err)
        assert bits(tmp_path) == bits(untouched)
        assert ranks(tmp_path) == []

    def test_a_killed_rank_is_started_again_and_resumes(self, tmp_path: Path, cache: Path, untouched: Path) -> None:
        write(tmp_path, launch=LAUNCH | {"max_restarts": 1})
        process = start_anew([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache, **QUIET)
        until(lambda: saved(tmp_path) >= 10, "a checkpoint", process, seconds=600)
        os.kill(ranks(tmp_path)[-1], signal.SIGKILL)
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, (out, err)
        assert "resuming after step" in out + err + (tmp_path / "out/log.txt").read_text()
        assert bits(tmp_path) == bits(untouched)
        assert [line["step"] for line in lines(tmp_path) if line["split"] == "train"] == list(range(1, STEPS + 1))

    def test_a_killed_rank_without_restarts_is_status_1(self, tmp_path: Path, cache: Path) -> None:
        write(tmp_path, launch=LAUNCH)
        process = start_anew([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache, **QUIET)
        until(lambda: step_of(tmp_path) >= 5, "step 5", process, seconds=600)
        os.kill(ranks(tmp_path)[0], signal.SIGKILL)
        _, err = process.communicate(timeout=900)
        assert process.returncode == 1, err
        assert "was killed by signal 9" in err
        until(lambda: ranks(tmp_path) == [], "every rank to end")

    def test_sigterm_saves_and_the_same_command_goes_on(self, tmp_path: Path, cache: Path, untouched: Path) -> None:
        write(tmp_path, launch=LAUNCH)
        process = start_anew([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache, **QUIET)
        until(lambda: step_of(tmp_path) >= 5, "step 5", process, seconds=600)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=900)
        assert process.returncode == 75, (out, err)
        assert saved(tmp_path) > 0
        finish(tmp_path, cache, "launch.name=local")
        assert bits(tmp_path) == bits(untouched)
