"""SLURM with `launch.ranks: elastic` and `launch.on_rank_failure: continue`, on a real cluster of two nodes: a rank is
killed, then a node is lost; the job keeps its allocation, and reads no checkpoint."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.distributed import job_record
from support import slurm_cluster
from support.command import bits, each_step_once, saved, step_of, write
from support.places import TESTS_PATH

reason = slurm_cluster.missing()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.processes,
    pytest.mark.skipif(reason is not None, reason=str(reason)),
    pytest.mark.timeout(900),
]
LAUNCH = {"name": "slurm", "machines": 2, "processes": 1, "device": "cpu", "threads": 1}
CONTINUE = {"ranks": "elastic", "on_rank_failure": "continue", "max_restarts": 3, "hang_timeout_s": 0}


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    running = slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm"))
    yield running
    running.stop()


def regrouped(folder: Path) -> list[str]:
    lines = (folder / "out/events.jsonl").read_text().splitlines()
    return [event["what"] for event in map(json.loads, lines) if event["event"] == "regroup"]


def submitted(folder: Path, cluster: slurm_cluster.Cluster, monkeypatch: pytest.MonkeyPatch, hold: int) -> str:
    """Submit a job that pauses at a step; return its number."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    monkeypatch.setenv("PYTHONPATH", TESTS_PATH, prepend=os.pathsep)
    write(
        folder,
        launch=LAUNCH | CONTINUE | {"python": cluster.python},
        strategy={"name": "support.waiting_at_steps.HeldTogether"},
    )
    (folder / "hold").write_text(str(hold))
    assert main(["train", "run.yaml", "--detach"]) == 0
    record = job_record.read(folder / "out")
    assert record is not None
    return str(record.job)


def test_a_rank_and_then_a_node_are_lost(
    tmp_path: Path, cluster: slurm_cluster.Cluster, untouched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = submitted(tmp_path, cluster, monkeypatch, hold=8)
    cluster.until(lambda: step_of(tmp_path) >= 8, "step 8", 600)
    started = job_record.read(tmp_path / "out")
    assert started is not None
    assert started.main is not None
    os.kill(started.main.pid, signal.SIGKILL)  # rank 0
    back = ["rank 0 was lost", "rank 1 joined with the state of the others"]
    cluster.until(lambda: regrouped(tmp_path) == back, "its return", 400)
    (tmp_path / "hold").write_text(str(step_of(tmp_path) + 1))
    cluster.kill_node("n2")
    cluster.until(lambda: len(regrouped(tmp_path)) == 3, "the others to go on", 400)
    (tmp_path / "hold").unlink()
    cluster.until(lambda: cluster.field(number, "JobState") == "COMPLETED", "the end of the job", 400)
    assert cluster.field(number, "Restarts") == "0"
    said = (tmp_path / f"out/slurm-{number}.out").read_text()
    assert "resuming after step" not in said
    assert "the other ranks continue" in said
    assert (tmp_path / "out/events.jsonl").read_text().count('"event": "start"') == 1
    assert bits(tmp_path) == bits(untouched)
    each_step_once(tmp_path, untouched)


@pytest.mark.slow
@pytest.mark.long
def test_the_first_node_is_lost(
    tmp_path: Path, cluster: slurm_cluster.Cluster, untouched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store and the job's script are lost with it, and SLURM would keep the rest of the job forever. The job is
    queued again, and resumes from its checkpoint."""
    number = submitted(tmp_path, cluster, monkeypatch, hold=12)
    cluster.until(lambda: step_of(tmp_path) >= 12 and saved(tmp_path) == 10, "step 12 and a checkpoint", 600)
    cluster.kill_node("n1")
    cluster.until(lambda: cluster.field(number, "Restarts") == "1", "the job to be queued again", 400)
    (tmp_path / "hold").unlink()
    cluster.start_node("n1")
    cluster.hurry(number)
    cluster.until(lambda: cluster.field(number, "JobState") == "COMPLETED", "the end of the job", 600)
    assert "resuming after step 10" in (tmp_path / f"out/slurm-{number}.out").read_text()
    assert bits(tmp_path) == bits(untouched)
    each_step_once(tmp_path, untouched)
