"""Jobs and their weights on a real SLURM cluster of two nodes."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.distributed import job_record
from lockstep.launchers.slurm import array_plan, submit
from support import slurm_cluster
from support.command import LOCKSTEP, bits, each_step_once, ended, saved, start, step_of, write
from support.places import TESTS_PATH

reason = slurm_cluster.missing()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.processes,
    pytest.mark.skipif(reason is not None, reason=str(reason)),
    pytest.mark.timeout(900),
]
PLAIN = {"name": "slurm", "machines": 2, "processes": 1, "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    running = slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm"))
    yield running
    running.stop()


@pytest.fixture
def job(
    tmp_path: Path, cluster: slurm_cluster.Cluster, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, Path]]:
    """Submit a job that waits at step 25; return its id and folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    monkeypatch.setenv("PYTHONPATH", TESTS_PATH, prepend=os.pathsep)  # for the strategy that waits

    def submitted(*options: str, at: int = 25, **launch: object) -> tuple[str, Path]:
        if not (tmp_path / "run.yaml").exists():
            write(
                tmp_path,
                launch=PLAIN | {"python": cluster.python} | launch,
                strategy={"name": "support.waiting_strategy.Held"},
            )
        assert main(["train", "run.yaml", "--detach", *options]) == 0
        record = job_record.read(tmp_path / "out")
        assert record is not None
        cluster.until(lambda: step_of(tmp_path) >= at, f"step {at}", 600)
        return str(record.job), tmp_path

    return submitted


def done(cluster: slurm_cluster.Cluster, job: str, state: str = "COMPLETED") -> None:
    cluster.until(lambda: cluster.field(job, "JobState") == state, f"job {job} to be {state}", 600)


def requeued(cluster: slurm_cluster.Cluster, job: str, folder: Path) -> None:
    """Check that the job is queued with a checkpoint, then starts again and finishes."""
    cluster.until(lambda: cluster.field(job, "JobState") == "PENDING", f"job {job} to be queued again", 400)
    assert saved(folder) >= 20
    (folder / "go").touch()
    cluster.hurry(job)
    done(cluster, job)
    assert cluster.field(job, "Restarts") == "1"
    assert "resuming after step" in (folder / f"out/slurm-{job}.out").read_text()


@pytest.mark.processes
def test_two_nodes_have_the_bits_of_one_machine(
    tmp_path: Path, cache: Path, cluster: slurm_cluster.Cluster, untouched: Path
) -> None:
    """This job runs in new interpreters; the other jobs' processes are forked from one that has imported everything."""
    write(tmp_path, launch=PLAIN)
    status, out, err = ended(start([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache, **cluster.variables))
    assert status == 0, out + err
    assert "2 (ddp, exact)" in out  # the job's log was followed
    assert "running on n[1-2]" in out
    assert bits(tmp_path) == bits(untouched)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", ["srun", pytest.param("elastic", marks=pytest.mark.long)])
def test_a_signal_saves_and_requeues(
    ranks: str, job: Callable, cluster: slurm_cluster.Cluster, untouched: Path
) -> None:
    number, folder = job(ranks=ranks)
    cluster.ask("scancel", "--signal=TERM", number)
    requeued(cluster, number, folder)
    assert bits(folder) == bits(untouched)
    each_step_once(folder, untouched)


@pytest.mark.processes
@pytest.mark.long
def test_the_warning_before_the_time_limit(
    job: Callable, cluster: slurm_cluster.Cluster, untouched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELD_S", "600")
    number, folder = job(time="4m", warn="1m")
    requeued(cluster, number, folder)
    assert bits(folder) == bits(untouched)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", ["elastic", pytest.param("srun", marks=pytest.mark.long)])
def test_preemption(ranks: str, job: Callable, cluster: slurm_cluster.Cluster, untouched: Path) -> None:
    number, folder = job(ranks=ranks)
    other = cluster.ask(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"
    )
    requeued(cluster, number, folder)
    done(cluster, other.strip())
    assert bits(folder) == bits(untouched)
    each_step_once(folder, untouched)


@pytest.mark.processes
def test_a_node_that_is_lost(job: Callable, cluster: slurm_cluster.Cluster, untouched: Path) -> None:
    number, folder = job()
    cluster.kill_node("n2")
    cluster.until(lambda: cluster.field(number, "JobState") == "PENDING", "the job to be queued again", 400)
    cluster.start_node("n2")
    requeued(cluster, number, folder)
    assert bits(folder) == bits(untouched)


@pytest.mark.processes
def test_a_job_stopped_after_a_killed_rank_is_resumed_by_hand(
    job: Callable, cluster: slurm_cluster.Cluster, untouched: Path
) -> None:
    """The ranks restart in the same allocation and wait at step 25 again; the job is then resumed on one node."""
    number, folder = job(max_restarts=1)

    def rank_0() -> int:
        record = job_record.read(folder / "out")
        return 0 if record is None or record.main is None else record.main.pid

    os.kill(first := rank_0(), signal.SIGKILL)
    cluster.until(lambda: rank_0() != first and (folder / f"held-{rank_0()}").exists(), "the ranks to start again", 600)
    assert cluster.field(number, "JobState") == "RUNNING"
    assert cluster.field(number, "Restarts") == "0"
    assert main(["stop", "out"]) == 0
    assert cluster.field(number, "JobState") == "FAILED"
    assert cluster.field(number, "ExitCode") == "75:0"
    (folder / "go").touch()
    again = cluster.ask("sbatch", "--parsable", "--nodes=1", "out/job.sbatch").strip()
    done(cluster, again)
    assert bits(folder) == bits(untouched)
    record = job_record.read(folder / "out")
    assert record is not None
    assert (record.job, record.processes, record.status) == (again, 1, 0)


def test_a_cancelled_job_is_not_requeued(job: Callable, cluster: slurm_cluster.Cluster) -> None:
    number, folder = job()
    cluster.ask("scancel", number)
    done(cluster, number, "CANCELLED")
    assert saved(folder) >= 25
    assert main(["status", "out"]) == 0


@pytest.mark.processes
def test_srun_without_a_launcher(tmp_path: Path, cache: Path, cluster: slurm_cluster.Cluster, untouched: Path) -> None:
    write(tmp_path, launch={"device": "cpu", "threads": 1})
    command = ["srun", "-N2", "-n3", cluster.python, "-m", "lockstep", "train", "run.yaml"]
    status, out, err = ended(start(command, tmp_path, cache, **cluster.variables))
    assert status == 0, err
    assert "3 (ddp, exact)" in out
    assert bits(tmp_path) == bits(untouched)


@pytest.mark.processes
@pytest.mark.long
def test_torchrun_inside_srun(tmp_path: Path, cache: Path, cluster: slurm_cluster.Cluster, untouched: Path) -> None:
    write(tmp_path)
    torchrun = [cluster.python, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:13377", "--rdzv-id=7", "-m", "lockstep"]
    command = ["srun", "-N2", "--ntasks-per-node=1", *torchrun, "train", "run.yaml"]
    status, out, err = ended(start(command, tmp_path, cache, **cluster.variables))
    assert status == 0, err
    assert "2 (ddp, exact)" in out
    assert bits(tmp_path) == bits(untouched)


@pytest.mark.processes
def test_an_array_of_runs(
    here: Path, cluster: slurm_cluster.Cluster, untouched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    for trial in ("a", "b"):
        write(here / trial, launch=PLAIN | {"machines": 1, "python": cluster.python}, output=f"{trial}/out")
    files = [Path("a/run.yaml"), Path("b/run.yaml")]
    number = submit(array_plan(load("a/run.yaml", []), files, Path("trials"), at_most=1))
    for index, trial in enumerate(("a", "b")):
        done(cluster, f"{number}_{index}")
        assert bits(here / trial) == bits(untouched)
        record = job_record.read(here / trial / "out")
        assert record is not None
        assert record.facts == {"log": str(here / f"trials/slurm-{number}_{index}.out")}


@pytest.mark.parametrize(
    ("launch", "words"),
    [({"partition": "nowhere"}, "nowhere"), ({"machines": 5}, "node config"), ({"cpus": 64}, "node config")],
)
def test_the_real_sbatch_refuses(
    launch: dict,
    words: str,
    here: Path,
    cluster: slurm_cluster.Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    write(here, launch=PLAIN | launch, micro_batches=8)
    before = cluster.ask("squeue", "-h", "--states=all", "-o", "%i")
    assert main(["train", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert "nothing was queued" in said
    assert words.lower() in said.lower()
    assert cluster.ask("squeue", "-h", "--states=all", "-o", "%i") == before
    assert not (here / "out").exists()
