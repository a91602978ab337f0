"""One job under every launcher that runs here: the SHA-256 of the weights that each of them exports.

In: nothing. Out: a table, and JSON in --out. Hosts are network namespaces, SLURM is a real cluster of two nodes on this
machine, SageMaker's containers are two hosts with their folders as SageMaker lays them out. As root on Linux, with
iproute2, nftables, slurm-wlm and the extras accelerate and ray; what is missing is a row that says so.
Example: python benchmarks/launchers.py --out launchers.json
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import yaml

from support import slurm_cluster
from support.command import LOCKSTEP, ended, start
from support.host_jobs import PORT, SMALL
from support.hosts import Hosts, hosts, missing
from support.sagemaker import LAUNCH
from support.sagemaker_instances import instances

CPU = {"device": "cpu", "threads": 1, "processes": 1}
PAIR = f"launch.rendezvous={{first}}:{PORT}"


def write(folder: Path, launch: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(SMALL | {"launch": launch}))
    return folder


def sha256(export: Path) -> str:
    return hashlib.sha256((export / "model.safetensors").read_bytes()).hexdigest()


def here(folder: Path, cache: Path, launch: dict, **variables: str) -> str:
    """Run one command on this machine."""
    write(folder, launch)
    status, out, err = ended(start([*LOCKSTEP, "train", "run.yaml"], folder, cache, **variables))
    assert status == 0, out + err
    return sha256(folder / "out/export")


def there(folder: Path, cache: Path, *words: str) -> str:
    """Run the same command on each of two hosts; in `words`, {first} is the first one's address and {host} a number."""
    with hosts(2, folder, cache) as made:
        jobs = []
        for host in range(2):
            write(made.folder(host), CPU)
            options = [word.format(first=made.address(0), host=host) for word in words]
            jobs.append(made.start(host, [*LOCKSTEP, "train", "run.yaml", *options]))
        assert [job.ended() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
        return sha256(made.folder(0) / "out/export")


def torchruns(folder: Path, cache: Path) -> str:
    """Run torchrun on each of two hosts."""
    with hosts(2, folder, cache) as made:
        jobs = [_torchrun(made, host) for host in range(2)]
        assert [job.ended() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
        return sha256(made.folder(0) / "out/export")


def _torchrun(made: Hosts, host: int):  # type: ignore[no-untyped-def]
    write(made.folder(host), CPU)
    meet = [f"--rdzv-endpoint={made.address(0)}:{PORT}", "--rdzv-backend=c10d", "--nnodes=2", "--nproc-per-node=1"]
    own = [f"--local-addr={made.address(host)}", f"--rdzv-conf=is_host={int(host == 0)}"]  # host names do not resolve
    command = [sys.executable, "-m", "torch.distributed.run", *meet, *own]
    return made.start(host, [*command, "-m", "lockstep", "train", "run.yaml"])


def slurm(folder: Path, cache: Path, **launch: object) -> str:
    """Run on two nodes of a real cluster."""
    folder.mkdir(parents=True)
    cluster = slurm_cluster.Cluster(folder / "cluster")
    try:
        return here(folder / "job", cache, CPU | {"name": "slurm", "machines": 2} | launch, **cluster.variables)
    finally:
        cluster.stop()


def sagemaker(folder: Path, cache: Path) -> str:
    """Run the containers' command on two hosts."""
    with hosts(2, folder, cache) as made:
        values = {k: v for k, v in SMALL.items() if k not in ("launch", "output")}
        job = instances(made, **values, launch=LAUNCH | {"machines": 2, "timeout_s": 60})
        for status, out, err in job.run():
            assert status == 0, out + err
        return sha256(job.ml(0) / "model")


def ray(folder: Path, cache: Path) -> str:
    """Run two workers on a cluster that Ray starts here."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    return here(folder, cache, CPU | {"name": "ray", "processes": 2}, **quiet)


ROWS: dict[str, tuple[str, Callable[[Path, Path], str]]] = {
    "local, 1 process": ("", lambda f, c: here(f, c, CPU)),
    "local, 2 processes": ("", lambda f, c: here(f, c, CPU | {"processes": 2})),
    "local, 4 processes, fsdp2": ("", lambda f, c: _fsdp2(f, c)),
    "torchrun, 2 hosts": ("hosts", lambda f, c: there(f, c, "launch.name=torchrun", "launch.machines=2", PAIR)),
    "torchrun's own command, 2 hosts": ("hosts", torchruns),
    "accelerate launch, 2 hosts": (
        "hosts",
        lambda f, c: there(f, c, "launch.name=accelerate", "launch.machines=2", "launch.machine_rank={host}", PAIR),
    ),
    "tcp, 2 hosts": (
        "hosts",
        lambda f, c: there(
            f,
            c,
            "launch.name=tcp",
            f"launch.init_method=tcp://{{first}}:{PORT}",
            "launch.world_size=2",
            "launch.rank={host}",
        ),
    ),
    "SLURM, 2 nodes": ("slurm", slurm),
    "SLURM, 2 nodes, torch elastic inside": ("slurm", lambda f, c: slurm(f, c, ranks="elastic")),
    "Ray, 2 workers": ("ray", ray),
    "SageMaker's containers, 2 hosts": ("hosts", sagemaker),
}


def _fsdp2(folder: Path, cache: Path) -> str:
    write(folder, CPU | {"processes": 4})
    status, out, err = ended(start([*LOCKSTEP, "train", "run.yaml", "strategy.name=fsdp2"], folder, cache))
    assert status == 0, out + err
    return sha256(folder / "out/export")


def lacking(need: str) -> str | None:
    """Requirements of a row that this machine lacks."""
    if need == "hosts":
        return missing()
    if need == "slurm":
        return slurm_cluster.missing()
    if need == "ray" and importlib.util.find_spec("ray") is None:
        return "ray is not installed"
    return None


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS))
    own.add_argument("--out", type=Path)
    args = own.parse_args()
    found: dict[str, str] = {}
    print("| launcher | SHA-256 of the exported weights |\n|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for number, name in enumerate(args.only):
            need, run = ROWS[name]
            why = lacking(need)
            try:
                found[name] = (
                    f"not run: {why}" if why else run(Path(place).resolve() / str(number), Path(place) / "cache")
                )
            except AssertionError as caught:
                print(caught, file=sys.stderr)
                found[name] = "failed"
            print(f"| {name} | `{found[name]}` |", flush=True)
    if args.out:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "load": os.getloadavg()}
        args.out.write_text(json.dumps({"versions": versions, "sha256": found}, indent=1))
    sys.exit(len({sha for sha in found.values() if not sha.startswith("not run")}) != 1)


if __name__ == "__main__":
    main()
