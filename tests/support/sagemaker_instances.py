"""SageMaker instances as hosts with their own network."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from lockstep.config.run import load
from lockstep_clouds.code_bundle import archive
from lockstep_clouds.sagemaker import Sagemaker
from lockstep_clouds.sagemaker_request import COMMAND
from support.forked import programs
from support.harness import LEAN, TINY
from support.hosts import Hosts
from support.sagemaker import LAUNCH

STEPS = 20


RUN = TINY | {
    "name": "tiny",
    "output": "out",
    "steps": STEPS,
    "micro_batches": 4,
    "checkpoint": {"every": 5, "keep": 2},
    "track": {"every": 1},
    "verify": {"plain": False},  # as in `command.RUN`
    "launch": LAUNCH | {"machines": 2, "timeout_s": 60},
}


# A mount namespace in which /opt/ml is this host's folder, and names are those of the job.
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
        """Write the files that SageMaker puts there before the container starts."""
        ml = self.ml(host)
        for folder in ("code", "model", "output", "checkpoints", "input/config", "input/data/source"):
            (ml / folder).mkdir(parents=True, exist_ok=True)
        (ml / "input/data/source/source.tar.gz").write_bytes(self.source)
        hosts_of_job = [f"algo-{i + 1}" for i in range(self.made.count)]
        resources = {"current_host": f"algo-{host + 1}", "hosts": hosts_of_job, "network_interface_name": "eth0"}
        (ml / "input/config/resourceconfig.json").write_text(json.dumps(resources))
        (ml / "input/config/hyperparameters.json").write_text(json.dumps(self.request["HyperParameters"]))

    def start(self, host: int, warm: bool = False) -> Any:
        """Run the container's command as requested. `warm`: with a Python that has imported lockstep, not the job's
        code."""
        entry = self.request["AlgorithmSpecification"]
        assert entry["ContainerEntrypoint"] + entry["ContainerArguments"] == ["/bin/sh", "-c", COMMAND]
        script = CONTAINER.format(
            ml=self.ml(host),
            names=self.names,
            programs=programs(self.made.root / "programs") if warm else Path(sys.executable).parent,
            environment=" ".join(f"{key}={value!r}" for key, value in self.request["Environment"].items()),
            command=f"/bin/sh -c {COMMAND!r}",
        )
        path = os.pathsep.join([LEAN, *filter(None, [os.environ.get("PYTHONPATH")])])
        return self.made.start(host, ["sh", "-c", script], HOME="/nowhere", PYTHONPATH=path)

    def run(self, warm: bool = False) -> list[tuple[int, str, str]]:
        started = [self.start(host, warm) for host in range(self.made.count)]
        return [(job.ended(), job.out, job.err) for job in started]

    def moved(self) -> None:
        """Simulate reclaimed instances: the next ones get the content of S3, which all hosts write to."""
        kept = self.made.root / "s3"
        for host in range(self.made.count):
            shutil.copytree(self.ml(host) / "checkpoints", kept, dirs_exist_ok=True)
            shutil.rmtree(self.ml(host))
            self.lay_out(host)
        for host in range(self.made.count):
            shutil.copytree(kept, self.ml(host) / "checkpoints", dirs_exist_ok=True)


def instances(made: Hosts, *overrides: str, modules: dict[str, Path] | None = None, **values: Any) -> Instances:
    run = load(None, list(overrides), RUN | values)
    return Instances(made, Sagemaker().plan(run), modules or {})
