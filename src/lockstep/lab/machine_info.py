"""Probes of this machine: cores, memory, devices, packages, disks, tokens and caches.

In: a folder to write to. Out: facts by section, as JSON. Each probe has a time limit, and none can crash the caller:
code that may crash (torch, its drivers) runs in its own process, the rest in threads that are abandoned if they hang.
Tokens are only checked for presence.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.config.errors import RunError
from lockstep.distributed.hardware import available_cores, processor
from lockstep.launchers.local import LOOPBACK
from lockstep.launchers.processes import machine_limits

Facts = dict[str, Any]
NO_ANSWER = "no answer"  # first words of the failure of a probe that exceeded its time limit

# Packages that affect training, most important first.
PACKAGES = (
    *("lockstep-train", "torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy", "huggingface-hub"),
    *("accelerate", "deepspeed", "peft", "sacrebleu", "tensorboard", "wandb", "mlflow", "trackio"),
    *("ray", "boto3", "kubernetes"),
)
PROGRAMS = ("torchrun", "accelerate", "sbatch", "srun", "ray", "kubectl", "docker", "nvidia-smi")
TOKENS = (
    *("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "RAY_AUTH_TOKEN"),
)
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "glusterfs", "fuse", "9p", "afs")
_WRITE_BYTES = 64 * 2**20
_BLOCK_BYTES = 4 * 2**20

# Runs in its own process and prints one line of JSON, so that a crashing driver ends only that process.
_TORCH = """
import json, time, torch, torch.distributed as dist
threads = torch.get_num_threads()
torch.set_num_threads(1)  # the speed of a core; threads that wait for each other take long on a busy machine
cuda = torch.cuda.is_available()
def gflops(device, dtype):
    a = torch.randn(512, 512, device=device).to(dtype)
    best = 0.0
    for _ in range(4):
        if device == "cuda": torch.cuda.synchronize()
        start = time.perf_counter()
        float((a @ a)[0, 0])
        best = max(best, 2 * 512**3 / (time.perf_counter() - start) / 1e9)
    return round(best)
found = {
    "version": torch.__version__, "threads": threads,
    "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
    "backends": [n for n in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{n}_available")()],
    "one_core_gflops": {"fp32": gflops("cpu", torch.float32), "bf16": gflops("cpu", torch.bfloat16)},
    "cuda": torch.version.cuda, "hip": torch.version.hip,
    "devices": [
        {"name": p.name, "memory_gb": round(p.total_memory / 2**30, 1), "capability": f"{p.major}.{p.minor}"}
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if cuda else 0))
    ],
}
if cuda:
    found["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["gpu_gflops"] = {"fp32": gflops("cuda", torch.float32), "bf16": gflops("cuda", torch.bfloat16)}
print(json.dumps(found))
"""

# Check for `strategy.exact: portable`: prints a hash of results computed on this processor.
_PORTABLE = """
from lockstep.config import processor
processor.pin(True)
from lockstep.distributed import portable
portable.install(1)
print(portable.probe())
"""


def bounded(probe: Callable[[], Facts], seconds: float) -> Facts:
    """Run a probe, and return its result or `{"failed": why}`. Never raises; returns within the time limit."""
    answers: list[Facts] = []

    def work() -> None:
        try:
            answers.append(probe())
        except BaseException as error:  # a probe may fail in any way; the others continue
            answers.append({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})

    thread = threading.Thread(target=work, name="lockstep-probe", daemon=True)
    thread.start()
    thread.join(seconds)
    return dict(answers[0]) if answers else {"failed": f"{NO_ANSWER} in {seconds:g} s"}


def probe(folder: Path, seconds: float = 60.0) -> dict[str, Facts]:
    """Run all probes. `folder`: for checkpoints; `seconds`: time limit of the slowest probe."""
    sections: Mapping[str, tuple[Callable[[], Facts], float]] = {
        "machine": (machine, 5),
        "memory": (memory, 5),
        "processes": (several_processes, 10),
        "torch": (lambda: torch_facts(seconds), seconds + 5),
        "portable": (lambda: portable_facts(seconds), seconds + 5),
        "packages": (packages, 10),
        "programs": (programs, 5),
        "network": (network, 8),
        "folder": (lambda: file_system(folder), 20),
        "tokens": (tokens, 5),
        "caches": (caches, 5),
    }
    return {name: bounded(each, limit) for name, (each, limit) in sections.items()}


# -- one section each ------------------------------------------------------------------------------------------------


def machine() -> Facts:
    """Processor, system, and the cores that this process may use."""
    facts: Facts = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "processor": processor(),
        "cores": available_cores(),
        "cores_of_machine": os.cpu_count(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }
    if (quota := _cpu_quota()) is not None:
        facts["cores_by_quota"] = quota
    if sys.platform != "win32":
        import resource

        facts["open_files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return facts


def memory() -> Facts:
    """Host memory in GiB, and what a container may use of it."""
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if "kB" in line}
    facts: Facts = {}
    for name, key in (("total_gb", "MemTotal"), ("available_gb", "MemAvailable"), ("swap_gb", "SwapTotal")):
        if key in sizes:
            facts[name] = _gb(sizes[key])
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = "".join(_lines(path)).strip()
        if limit.isdigit() and int(limit) < sizes.get("MemTotal", 0):
            facts["limit_gb"] = _gb(int(limit))
    if Path("/dev/shm").is_dir():
        facts["shared_memory_gb"] = _gb(shutil.disk_usage("/dev/shm").free)
    return facts


def several_processes() -> Facts:
    """Return whether several ranks can start on this machine, by the checks of `lockstep train`."""
    try:
        machine_limits.check(LOOPBACK, max(2, available_cores()))
    except RunError as error:
        return {"failed": str(error)}
    return {"several can start": "yes"}


def torch_facts(seconds: float) -> Facts:
    """torch, its backends and devices, and their GFLOP/s."""
    answer = _of_python(_TORCH, seconds)
    return answer if "failed" in answer else dict(json.loads(answer["answer"]))


def gpu_facts(seconds: float) -> Facts:
    """Return `torch_facts` if this machine has a GPU driver, else {}."""
    return torch_facts(seconds) if _has_gpu_driver() else {}


def _has_gpu_driver() -> bool:
    """Return whether CUDA's driver library or ROCm's device exists, without initialising it; always True on systems
    other than Linux."""
    if not sys.platform.startswith("linux") or Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def portable_facts(seconds: float) -> Facts:
    """Return a hash of test results for `strategy.exact: portable`, equal on all supported machines with the same torch
    and numpy; or the reason why this machine is not supported."""
    answer = _of_python(_PORTABLE, seconds)
    return {"unsupported": answer["failed"]} if "failed" in answer else {"fingerprint": answer["answer"]}


def _of_python(code: str, seconds: float) -> dict[str, str]:
    """Run code in a new Python process; return its last output line, or the failure."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"{NO_ANSWER} in {seconds:g} s"}
    if done.returncode:
        error_lines = done.stderr.strip().splitlines()
        reason = error_lines[-1][:200] if error_lines else "no output"
        return {"failed": f"ended with {done.returncode}: {reason}"}
    return {"answer": done.stdout.strip().splitlines()[-1]}


def packages() -> Facts:
    """Versions of installed packages, without importing them."""
    return {name: version(name) for name in PACKAGES}


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def programs() -> Facts:
    """Paths of launchers beside this Python or on the PATH."""
    python_folder = Path(sys.executable).parent
    path = f"{python_folder}{os.pathsep}{os.environ.get('PATH', '')}"
    return {name: shutil.which(name, path=path) for name in PROGRAMS}


def network() -> Facts:
    """Return whether the host name resolves, which gloo and torchrun need, and whether the Hub is reachable."""
    host = socket.gethostname()
    facts: Facts = {"host_resolves": bounded(lambda: {"at": socket.gethostbyname(host)}, 3).get("at")}
    facts["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME")
    facts["interfaces"] = [name for _, name in socket.if_nameindex()]
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    place = (endpoint.hostname or "", endpoint.port or (443 if endpoint.scheme == "https" else 80))

    def connect() -> Facts:
        with socket.create_connection(place, timeout=3):
            return {"reached": True}

    facts["hub"] = f"{endpoint.scheme}://{endpoint.netloc.rpartition('@')[2]}"
    facts["hub_reachable"] = bool(bounded(connect, 4).get("reached"))
    facts["offline"] = os.environ.get("HF_HUB_OFFLINE", "0")
    return facts


def file_system(folder: Path, seconds: float = 3.0) -> Facts:
    """Write (with fsync) and read speed of a folder in MB/s, and the time of a sync in ms.

    Writes at most 64 MiB for at most `seconds`, to a temporary file.
    """
    facts: Facts = {"path": str(folder.resolve()), "type": _kind_of(folder)}
    facts["shared"] = bool(facts["type"]) and str(facts["type"]).startswith(_SHARED)
    facts["free_gb"] = _gb(shutil.disk_usage(folder).free)
    path = folder / f".lockstep-doctor-{socket.gethostname()}-{os.getpid()}"
    block, written = os.urandom(_BLOCK_BYTES), 0
    try:
        begin = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            while written < _WRITE_BYTES and time.perf_counter() - begin < seconds:
                written += file.write(block)
            os.fsync(file.fileno())
            facts["write_mb_s"] = round(written / 1e6 / (time.perf_counter() - begin))
            again = time.perf_counter()
            file.write(b"x")
            os.fsync(file.fileno())
            facts["sync_ms"] = round((time.perf_counter() - again) * 1e3, 2)
        begin, read = time.perf_counter(), 0
        with open(path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read from the disk, not from memory
            while (got := len(file.read(_BLOCK_BYTES))) and time.perf_counter() - begin < seconds:
                read += got
        facts["read_mb_s"] = round(read / 1e6 / (time.perf_counter() - begin))
    finally:
        path.unlink(missing_ok=True)
    return facts


def tokens() -> Facts:
    """Names of secrets that are set, without their values."""
    facts: Facts = {name: bool(os.environ.get(name)) for name in TOKENS}
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    facts["Hub login"] = (home / "token").is_file()
    return facts


def caches() -> Facts:
    """Locations of the caches of downloads and tokenized data, and their free space (GiB)."""
    from lockstep.data.cache import cache_folder

    places = {
        "lockstep": cache_folder(),
        "huggingface": Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser(),
    }
    facts: Facts = {}
    for name, place in places.items():
        there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        facts[name] = {
            "path": str(place),
            "free_gb": _gb(shutil.disk_usage(there).free),
            "writable": os.access(there, os.W_OK),
        }
    return facts


# -- small parts -----------------------------------------------------------------------------------------------------


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _gb(size: int) -> float:
    return round(size / 2**30, 1)


def _cpu_quota() -> float | None:
    """CPU quota of the container in cores."""
    words = " ".join(_lines("/sys/fs/cgroup/cpu.max")).split()
    return round(int(words[0]) / int(words[1]), 2) if len(words) == 2 and words[0].isdigit() else None


def _kind_of(folder: Path) -> str | None:
    """Type of the file system that holds a folder, from its longest mount point."""
    place, best = str(folder.resolve()), ("", None)
    for line in _lines("/proc/mounts"):
        _, mount, kind, *_ = line.split()
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)  # type: ignore[assignment]
    return best[1]
