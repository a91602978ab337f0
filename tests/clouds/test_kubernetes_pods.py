"""The pods of a Kubernetes Job, as far as they can be played without a cluster: two hosts with the manifests' command,
variables, mounts and names. One is told to go, as at an eviction; both are started again, as the Job would."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config.run import Run, load
from lockstep_clouds.kubernetes import Kubernetes
from lockstep_clouds.kubernetes_manifests import name_of, output_of
from support.command import finish, until, write
from support.forked import programs
from support.harness import TINY
from support.hosts import Hosts, cluster, hosts
from support.kubernetes import LAUNCH
from support.places import TESTS_PATH

pytestmark = [pytest.mark.processes, *cluster, pytest.mark.timeout(1200)]
RUN = TINY | {
    "name": "tiny",
    "output": "out",
    "steps": 24,
    "micro_batches": 4,
    "checkpoint": {"every": 5, "keep": 2},
    "track": {"every": 1},
    "verify": {"plain": False},  # as in `command.RUN`
    "launch": LAUNCH | {"machines": 2, "device": "cpu", "stuck_minutes": 0},
}
# A mount namespace of its own with the volumes of the pod; process 1 of a container is the command itself.
CONTAINER = """
mount -t tmpfs none /mnt && mkdir -p /mnt/lockstep /mnt/etc && cp {run}/* /mnt/etc && mount --bind {names} /etc/hosts &&
export {environment} && cd /mnt && exec {command}
"""


class Pods:
    """The pods of one Job, which share a volume."""

    def __init__(self, made: Hosts, run: Run) -> None:
        self.made = made
        (text,) = Kubernetes().plan(run).files.values()
        config, service, job = yaml.safe_load_all(text)
        self.volume = made.root / "volume"
        self.volume.mkdir(exist_ok=True)
        self.run = made.root / "configmap"
        self.run.mkdir(exist_ok=True)
        for name, content in config["data"].items():
            (self.run / name).write_text(content.replace("/lockstep/", f"{self.volume}/"))
        self.names = made.root / "hosts"
        name = name_of(run)
        assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == name
        told = [f"{made.address(host)} {name}-{host}.{name} {name}-{host}" for host in range(made.count)]
        self.names.write_text("127.0.0.1 localhost\n" + "\n".join(told) + "\n")
        self.container = job["spec"]["template"]["spec"]["containers"][0]
        self.output = self.volume / Path(output_of(run)).name

    def start(self, host: int) -> Any:
        variables = {e["name"]: e["value"] for e in self.container["env"] if "value" in e}
        variables |= {"LOCKSTEP_NODE_RANK": str(host), "PYTHONPATH": f"/mnt/etc:{TESTS_PATH}", "HOME": "/mnt"}
        variables["LOCKSTEP_CACHE"] = str(self.made.cache)
        del variables["HF_HOME"]  # nothing comes from the Hub, and with another one no process could be forked
        words = [word.replace("$(LOCKSTEP_NODE_RANK)", str(host)) for word in self.container["command"]]
        assert words[0] == "python"
        words = [str(programs(self.made.root / "programs") / "python"), *words[1:]]
        script = CONTAINER.format(
            run=self.run,
            names=self.names,
            environment=" ".join(f"{key}={value!r}" for key, value in variables.items()),
            command=" ".join(words).replace("/etc/lockstep/", "/mnt/etc/"),
        )
        return self.made.start(host, ["sh", "-c", script])


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "export/model.safetensors").read_bytes()).hexdigest()


def test_an_evicted_pod_stops_both_and_they_resume_to_the_bits_of_one_process(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "local", **RUN | {"launch": {"name": "local", "processes": 1, "device": "cpu", "threads": 1}})
    finish(tmp_path / "local", cache)
    with hosts(2, tmp_path, cache) as made:
        pods = Pods(made, load(None, [], RUN))
        started = [pods.start(host) for host in range(2)]
        until(lambda: any(pods.output.glob("checkpoints/step-*")), "a checkpoint", started[0].process, seconds=600)
        trains = next(pid for pid in made.pids(1) if b"lockstep\0train" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(trains, signal.SIGTERM)  # to process 1 of one pod
        assert [job.ended() for job in started] == [75, 75], [(job.out, job.err) for job in started]
        started = [pods.start(host) for host in range(2)]
        assert [job.ended() for job in started] == [0, 0], [(job.out, job.err) for job in started]
        assert "resuming after step" in started[0].out
        assert weights(pods.output) == weights(tmp_path / "local/out")
