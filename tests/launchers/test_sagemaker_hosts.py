"""SageMaker's containers, really run: two hosts with their own network, names, and /opt/ml as SageMaker lays it out."""

import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support.command import finish, until, write
from support.harness import LEAN, TINY
from support.hosts import Hosts, cluster, hosts
from test_sagemaker import LAUNCH

from lockstep.config.run import load
from lockstep.launchers.cloud.code_bundle import archive
from lockstep.launchers.cloud.sagemaker_request import COMMAND
from lockstep.launchers.sagemaker import Sagemaker

pytestmark = [pytest.mark.processes, *cluster, pytest.mark.timeout(1200)]
STEPS = 20
RUN = TINY | {
    "name": "tiny",
    "output": "out",
    "steps": STEPS,
    "micro_batches": 4,
    "checkpoint": {"every": 5, "keep": 2},
    "track": {"every": 1},
    "launch": LAUNCH | {"machines": 2, "timeout_s": 60},
}


# A mount namespace of its own, in which /opt/ml is this host's folder, and names are those of the job.
CONTAINER = """
mount -t tmpfs none /opt && mkdir /opt/ml && mount --bind {ml} /opt/ml && mount --bind {names} /etc/hosts &&
export PATH={programs}:$PATH PIP_NO_INDEX=1 && {environment} exec {command}
"""


class Instances:
    """The instances of a training job."""

    def __init__(self, made: Hosts, plan: Any, modules: dict[str, Path]) -> None:
        self.made = made
        texts = {Path(name).name: text for name, text in plan.files.items() if not name.endswith(".json")}
        self.source = archive(texts, modules)
        self.request = json.loads(next(text for name, text in plan.files.items() if name.endswith(".json")))
        names = [f"{made.address(host)} algo-{host + 1}" for host in range(made.count)]
        self.names = made.root / "hosts"
        self.names.write_text("127.0.0.1 localhost\n" + "\n".join(names) + "\n")
        for host in range(made.count):
            self.lay_out(host)

    def ml(self, host: int) -> Path:
        return self.made.folder(host) / "ml"

    def lay_out(self, host: int) -> None:
        """What SageMaker has put there when the container starts."""
        ml = self.ml(host)
        for folder in ("code", "model", "output", "checkpoints", "input/config", "input/data/source"):
            (ml / folder).mkdir(parents=True, exist_ok=True)
        (ml / "input/data/source/source.tar.gz").write_bytes(self.source)
        hosts_of_job = [f"algo-{i + 1}" for i in range(self.made.count)]
        resources = {"current_host": f"algo-{host + 1}", "hosts": hosts_of_job, "network_interface_name": "eth0"}
        (ml / "input/config/resourceconfig.json").write_text(json.dumps(resources))
        (ml / "input/config/hyperparameters.json").write_text(json.dumps(self.request["HyperParameters"]))

    def start(self, host: int) -> Any:
        """Run the container's command as the request has it."""
        entry = self.request["AlgorithmSpecification"]
        assert entry["ContainerEntrypoint"] + entry["ContainerArguments"] == ["/bin/sh", "-c", COMMAND]
        script = CONTAINER.format(
            ml=self.ml(host),
            names=self.names,
            programs=Path(sys.executable).parent,
            environment=" ".join(f"{key}={value!r}" for key, value in self.request["Environment"].items()),
            command=f"/bin/sh -c {COMMAND!r}",
        )
        path = os.pathsep.join([LEAN, *filter(None, [os.environ.get("PYTHONPATH")])])
        return self.made.start(host, ["sh", "-c", script], HOME="/nowhere", PYTHONPATH=path)

    def run(self) -> list[tuple[int, str, str]]:
        started = [self.start(host) for host in range(self.made.count)]
        return [(job.ended(), job.out, job.err) for job in started]

    def moved(self) -> None:
        """AWS took the instances back: the next ones get what was brought to S3, which all hosts write to."""
        kept = self.made.root / "s3"
        for host in range(self.made.count):
            shutil.copytree(self.ml(host) / "checkpoints", kept, dirs_exist_ok=True)
            shutil.rmtree(self.ml(host))
            self.lay_out(host)
        for host in range(self.made.count):
            shutil.copytree(kept, self.ml(host) / "checkpoints", dirs_exist_ok=True)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> str:
    """SHA-256 of the weights that the same run gives on this machine as one process."""
    folder = tmp_path_factory.mktemp("local")
    write(folder, **RUN | {"launch": {"name": "local", "processes": 1, "device": "cpu", "threads": 1}})
    finish(folder, cache)
    return weights(folder / "out/export")


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def instances(made: Hosts, *overrides: str, modules: dict[str, Path] | None = None, **values: Any) -> Instances:
    run = load(None, list(overrides), RUN | values)
    return Instances(made, Sagemaker().plan(run), modules or {})


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
    results = job.run()
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
def test_two_hosts_go_on_elsewhere_with_the_bits_of_one_process(
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
