"""SageMaker's containers, really run: two hosts with their own network, names, and /opt/ml as SageMaker lays it out."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from support.command import finish, until, write
from support.hosts import Hosts, cluster, hosts
from support.sagemaker_instances import RUN, STEPS, Instances, instances

pytestmark = [pytest.mark.processes, *cluster, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> str:
    """SHA-256 of the weights that the same run gives on this machine as one process."""
    folder = tmp_path_factory.mktemp("local")
    write(folder, **RUN | {"launch": {"name": "local", "processes": 1, "device": "cpu", "threads": 1}})
    finish(folder, cache)
    return weights(folder / "out/export")


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


FAILS_ON_ONE = """
from lockstep.strategies.allreduce import AllReduce

class Broken(AllReduce):
    def train_step(self, batch, learning_rate):
        if batch.step == 12 and self.world.rank == 1:
            raise ValueError("algo-2 has had enough")
        return super().train_step(batch, learning_rate)
"""


def failed(made: Hosts, folder: Path) -> None:
    """Code that fails on one host ends both, and says why."""
    module = folder / "broken_module.py"
    module.write_text(FAILS_ON_ONE)
    job = instances(made, modules={"broken_module.py": module}, strategy={"name": "allreduce"})
    swap(job, "name: allreduce", "name: broken_module.Broken")
    results = job.run(warm=True)
    assert all(status == 1 for status, _, _ in results), results
    assert "algo-2 has had enough" in (job.ml(1) / "output/failure").read_text()
    assert (job.ml(0) / "output/failure").exists()


def taken_back(made: Hosts) -> None:
    job = instances(made)
    started = [job.start(host) for host in range(2)]
    saved = job.ml(0) / "checkpoints/checkpoints"
    until(lambda: any(saved.glob("step-*")), "a checkpoint", started[0].process, seconds=600)
    for host in range(2):
        made.kill(host)
    for job_of_host in started:
        job_of_host.ended()


def stopped(made: Hosts) -> int:
    """A job that goes on, and stops by itself. Returns the step that it went on after."""
    job = instances(made, "max_time=0.001s")
    job.moved()
    results = job.run()
    assert [status for status, _, _ in results] == [75, 75], results
    for host in range(2):
        assert (job.ml(host) / "output/failure").read_text().startswith("lockstep: stopped on request")
    return int(results[0][1].partition("resuming after step ")[2].split()[0])


@pytest.mark.parametrize("how", ["failed", *(pytest.param(how, marks=pytest.mark.long) for how in ("back", "stopped"))])
def test_two_replaced_hosts_resume_with_the_bits_of_one_process(
    how: str, tmp_path: Path, cache: Path, local: str
) -> None:
    with hosts(2, tmp_path, cache) as made:
        if how == "failed":
            failed(made, tmp_path)
        else:
            taken_back(made)
        before = stopped(made) if how == "stopped" else 5

        job = instances(made)
        job.moved()
        results = job.run()
        assert [status for status, _, _ in results] == [0, 0], results
        assert before <= int(results[0][1].partition("resuming after step ")[2].split()[0]) < STEPS
        assert weights(job.ml(0) / "model") == local
        assert (job.ml(0) / "model/lockstep/metrics.jsonl").exists()
        assert not list((job.ml(1) / "model").iterdir())  # rank 0's host alone
        assert not (job.ml(0) / "output/failure").exists()


def swap(job: Instances, before: str, after: str) -> None:
    """Change run.yaml in the source that the hosts get."""
    held: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(job.source)) as tar:
        for member in tar.getmembers():
            file = tar.extractfile(member)
            assert file is not None
            held[member.name] = file.read()
    assert before.encode() in held["run.yaml"]
    held["run.yaml"] = held["run.yaml"].replace(before.encode(), after.encode())
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, content in held.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    job.source = made.getvalue()
    job.request["HyperParameters"].pop("strategy.name")
    for host in range(job.made.count):
        job.lay_out(host)
