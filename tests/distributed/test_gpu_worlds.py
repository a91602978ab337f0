"""Worlds of GPUs, on a machine that has none: what torch is told of NCCL, which variables are set, and what launchers
ask for."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.config.plugins import find
from lockstep.config.run import Run
from lockstep.distributed import network, torch_internals
from lockstep.distributed.rendezvous import Rendezvous
from lockstep.distributed.world import World
from support.harness import tiny
from support.messages import raises

MINUTE = timedelta(minutes=1)
GPU = torch.device("cuda", 1)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of the process groups that were requested from torch: the default one, then the others."""
    found: list[dict[str, Any]] = []

    def made(backend: str | None = None, **arguments: Any) -> object:
        found.append({"backend": backend, **arguments})
        return object()

    monkeypatch.setattr(dist, "init_process_group", made)
    monkeypatch.setattr(dist, "new_group", made)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    return found


def meet(where: str, shared: bool = False, device: torch.device = GPU) -> None:
    Rendezvous(where, 1, 4, True, MINUTE, shared, store=dist.HashStore()).join(device)


@pytest.mark.parametrize(
    ("device", "shared", "backend", "bound"),
    [
        (GPU, False, "cpu:gloo,cuda:nccl", GPU),  # a rank's GPU is told, so that NCCL guesses none
        (GPU, True, "gloo", None),  # NCCL refuses two ranks on one
        (torch.device("cpu"), False, "gloo", None),
    ],
)
def test_the_default_group(
    device: torch.device, shared: bool, backend: str, bound: torch.device | None, told: list[dict[str, Any]]
) -> None:
    meet("file:///nowhere", shared, device)
    default, control = told
    assert (default["backend"], default.get("device_id")) == (backend, bound)
    assert (default["rank"], default["world_size"], default["timeout"]) == (1, 4, MINUTE)
    assert (control["backend"], control["timeout"]) == ("gloo", MINUTE)  # decisions never wait for the device
    assert "device_id" not in control


@pytest.mark.parametrize(
    ("found", "own", "nccl"), [("eth1", None, "eth1"), ("eth1", "ib0", "ib0"), ("lo", None, None), (None, None, None)]
)
def test_nccl_uses_the_interface_that_gloo_does(
    found: str | None, own: str | None, nccl: str | None, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user says otherwise; among the ranks of one machine NCCL needs none."""
    monkeypatch.setattr(network, "interface_to", lambda host, several: found)
    if own is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", own)
    before = {name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_"))}
    meet("tcp://10.0.0.1:29500")
    assert os.environ.get("GLOO_SOCKET_IFNAME") == found
    assert os.environ.get("NCCL_SOCKET_IFNAME") == nccl
    after = {name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_"))}
    assert after - before <= {"NCCL_SOCKET_IFNAME"}  # nothing else of NCCL's or CUDA's is ours to say


def test_an_interface_that_the_user_names_is_left_alone(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    meet("tcp://10.0.0.1:29500")
    assert "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize("exact", [True, False])
def test_a_rank_takes_its_gpu_and_exact_runs_reproducible_kernels(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch_internals, "gloo_threads", lambda count: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(World, "_meet", lambda self: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for name, value in {"RANK": 6, "WORLD_SIZE": 8, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    world = World(tiny("strategy.name=ddp", "launch.device=cuda", f"strategy.exact={str(exact).lower()}"))
    monkeypatch.setattr(world.stop, "listen", lambda: None)
    world.join()
    assert taken == [torch.device("cuda", 2)]
    assert asked == [True] * exact
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if exact else None)
    assert torch.utils.deterministic.fill_uninitialized_memory is not exact  # type: ignore[attr-defined]


def test_engines_take_the_local_rank_for_the_number_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    with World(tiny("launch.device=cuda", "launch.processes_per_gpu=2")).variables_for_engines():
        assert os.environ["LOCAL_RANK"] == "1"
    assert os.environ["LOCAL_RANK"] == "3"


@pytest.mark.parametrize("before", [None, "7"])
def test_engines_change_no_number_of_threads(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate would set cores / ranks without the variable: other bits than one process."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if before is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", before)
    threads = torch.get_num_threads()
    with World(tiny("launch.device=cpu")).variables_for_engines():
        assert os.environ["OMP_NUM_THREADS"] == str(threads)
        torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads
    assert os.environ.get("OMP_NUM_THREADS") == before


# -- launchers -------------------------------------------------------------------------------------------------------


def job(folder: Path, name: str, **launch: Any) -> Run:
    launch = {"name": name, "device": "cuda", "threads": 1, **launch}
    return tiny("strategy.name=ddp", launch=launch, output=str(folder / "out"))


POD = {"image": "lockstep", "pvc": "disk"}


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "launch", "processes", "said"),
    [
        ("local", {}, 2, ""),
        ("local", {"processes_per_gpu": 3}, 6, ""),
        ("torchrun", {}, 2, "--nproc-per-node=2"),
        ("torchrun", {"machines": 2, "rendezvous": "localhost:29400"}, 4, "--nproc-per-node=2"),
        ("accelerate", {}, 2, "--num_processes=2 --multi_gpu"),
        ("slurm", {"machines": 2, "gpus": 4}, 8, "--gpus-per-node=4"),
        ("slurm", {"gpus": 2, "processes_per_gpu": 2}, 4, "--gpus-per-node=2"),
        ("kubernetes", {**POD, "machines": 2, "gpus": 4}, 8, "nvidia.com/gpu: '4'"),
        ("kubernetes", {**POD, "gpus": 2, "processes_per_gpu": 2}, 4, "nvidia.com/gpu: '2'"),
        ("ray", {"workers": 8}, 8, "use_gpu=True, resources_per_worker={'CPU': 1, 'GPU': 1}"),
    ],
)
def test_plans_request_one_process_per_gpu_and_all_gpus(
    name: str, launch: dict[str, Any], processes: int, said: str, tmp_path: Path
) -> None:
    plan = find("launchers", name)().plan(job(tmp_path, name, **launch))
    assert plan.processes == processes
    assert said in "\n".join([" ".join(plan.command), *plan.notes, *plan.files.values()])
    assert "ACCELERATE_USE_CPU" not in plan.variables


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "launch", "code"),
    [
        ("slurm", {"processes": 4, "gpus": 2}, "LS7389"),
        ("kubernetes", {**POD, "processes": 5, "gpus": 2, "processes_per_gpu": 2}, "LS7245"),
        ("kubernetes", {**POD, "processes": 2}, "LS7244"),
        ("ray", {"workers": 4, "processes_per_gpu": 2}, "LS7360"),
        ("local", {"processes": 3}, "LS7290"),
    ],
)
def test_too_few_gpus_are_reported_by_the_plan(name: str, launch: dict[str, Any], code: str, tmp_path: Path) -> None:
    with raises(code):
        find("launchers", name)().plan(job(tmp_path, name, **launch))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["torchrun", "accelerate"])
def test_too_few_gpus_are_reported_before_a_process_starts(name: str, tmp_path: Path) -> None:
    launcher = find("launchers", name)()
    run = job(tmp_path, name, processes=3)
    with raises("LS7290", "2"):
        launcher.start(launcher.plan(run))
    slow = job(tmp_path, "slurm", processes=4, gpus=2, device="cpu")  # nobody computes on them
    assert find("launchers", "slurm")().plan(slow).processes == 4
