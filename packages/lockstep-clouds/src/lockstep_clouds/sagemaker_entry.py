"""Entry point in each container of a SageMaker training job: from SageMaker's folders to `lockstep train`, and back.

In: /opt/ml/code (lockstep, run.yaml, requirements.txt), /opt/ml/input (data, hyperparameters, host names). Out:
/opt/ml/checkpoints during training, /opt/ml/model at the end, /opt/ml/output/failure on failure, and the exit status.
Only the standard library is imported at the top: lockstep's requirements are installed first.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ML = Path("/opt/ml")
STOPPED, RESUMABLE = "lockstep: stopped on request", 75


@dataclass(frozen=True)
class Hosts:
    """Names of the job's instances, and which of them is this one."""

    names: tuple[str, ...]  # algo-1, algo-2, ...: ranks rendezvous at the first
    mine: str
    interface: str | None  # network interface between them

    @classmethod
    def read(cls, folder: Path, variables: Mapping[str, str]) -> Hosts:
        """Read resourceconfig.json, which SageMaker writes; else SM_HOSTS and similar variables of its toolkit."""
        try:
            config = json.loads((folder / "resourceconfig.json").read_text())
        except OSError:
            config = {
                "hosts": json.loads(variables.get("SM_HOSTS", '["localhost"]')),
                "current_host": variables.get("SM_CURRENT_HOST", "localhost"),
                "network_interface_name": variables.get("SM_NETWORK_INTERFACE_NAME"),
            }
        names = sorted(config["hosts"], key=lambda name: (len(name), name))  # algo-2 before algo-10
        return cls(tuple(names), config["current_host"], config.get("network_interface_name"))


def main() -> int:
    """Run one host. Returns the exit status of the container."""
    tail = Tail()
    try:
        status = run(Hosts.read(ML / "input/config", os.environ))
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    if status:
        last_output = tail.text()
        first = f"{STOPPED}\n" if status == RESUMABLE else ""
        (ML / "output").mkdir(parents=True, exist_ok=True)
        (ML / "output/failure").write_text(f"{first}exit status {status}\n{last_output}", encoding="utf-8")
    return status


def run(hosts: Hosts) -> int:
    """Install, set up, train, and put the results where SageMaker expects them."""
    code = Path.cwd()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if done := subprocess.run([*install, "-r", str(code / "requirements.txt")]).returncode:
        print(f"pip could not install {code / 'requirements.txt'}", file=sys.stderr)
        return 1 if done != RESUMABLE else done
    set_secrets()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(code), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    words = ["train", str(code / "run.yaml"), *overrides(ML / "input/config/hyperparameters.json")]
    if len(hosts.names) > 1:
        words.append(f"launch.node_rank={hosts.names.index(hosts.mine)}")
        words.append(f"launch.rendezvous={hosts.names[0]}:{os.environ.get('LOCKSTEP_PORT', '29400')}")
        if hosts.interface is not None:
            words.append(f"launch.interface={hosts.interface}")
    # as in `python -m lockstep`, this file is the program's entry point and runs completely inside
    status = int(importlib.import_module("lockstep.cli").main(words))
    if status == 0:
        keep(ML / "checkpoints")
    return status


def overrides(path: Path) -> list[str]:
    """Overrides `key=value` from the job's hyperparameters. They equal run.yaml, unless the job is a modified copy or
    part of a tuning job."""
    values: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return [f"{key}={value}" for key, value in sorted(values.items()) if not key.startswith(("sagemaker_", "_"))]


def set_secrets() -> None:
    """Set environment variables from secrets of AWS Secrets Manager; the job contains only their names."""
    names: dict[str, str] = json.loads(os.environ.get("LOCKSTEP_SECRETS", "{}"))
    if names:
        import boto3

        client = boto3.client("secretsmanager", region_name=os.environ.get("AWS_REGION"))  # boto3 does not read it
        os.environ.update({key: client.get_secret_value(SecretId=name)["SecretString"] for key, name in names.items()})


def keep(output: Path) -> None:
    """Save the export, curves and report as the job's model; only on rank 0's host."""
    if (output / "export").is_dir():
        shutil.copytree(output / "export", ML / "model", dirs_exist_ok=True)
        for name in ("run.yaml", "metrics.jsonl", "report.html"):
            if (output / name).exists():
                (ML / "model/lockstep").mkdir(exist_ok=True)
                shutil.copy(output / name, ML / "model/lockstep" / name)


class Tail:
    """Forwards standard error of this process and its children, and remembers its end."""

    def __init__(self, characters: int = 4000) -> None:
        self._tail: deque[bytes] = deque(maxlen=characters)
        read, write = os.pipe()
        self._real = os.dup(2)
        os.dup2(write, 2)
        os.close(write)
        self._thread = threading.Thread(target=self._pass_on, args=(read,), daemon=True)
        self._thread.start()

    def _pass_on(self, read: int) -> None:
        while block := os.read(read, 4096):
            with suppress(OSError):  # nothing reads it any more; the pipe must not fill up
                os.write(self._real, block)
            self._tail.extend(block[i : i + 1] for i in range(len(block)))

    def text(self) -> str:
        """Return the last characters, and restore standard error. Call it when all writers have ended."""
        sys.stderr.flush()
        os.dup2(self._real, 2)
        self._thread.join(2)  # do not wait for children that still hold the pipe
        return b"".join(self._tail).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
