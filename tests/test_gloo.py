"""Threads of a gloo group: as few as keep torch from freeing memory twice."""

import pytest
import torch
import torch.distributed as dist
from harness import run_on, tiny
from torch.distributed.device_mesh import init_device_mesh

from lockstep.distributed.world import World

pytestmark = pytest.mark.processes


def threads(world: World) -> list[int]:
    """Of the group of all, of that for decisions, of a mesh's, and of one that comes after them."""
    across = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("one", "all")).get_group("all")
    groups = [dist.group.WORLD, world._control, across, dist.new_group()]
    assert all(dist.get_backend(group) == "gloo" for group in groups)
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("strategy", "count"),
    [("ddp", 2), ("allreduce", 2), ("fsdp2", 1), ("hf_accelerate", 1)],
)
def test_functional_collectives_are_ended_by_one_thread(strategy: str, count: int) -> None:
    assert run_on(2, threads, run=tiny(f"strategy.name={strategy}")) == [[count] * 4] * 2


def test_inexact_runs_too() -> None:
    assert run_on(2, threads, run=tiny("strategy.name=ddp", "strategy.exact=false")) == [[1] * 4] * 2


def gathered(world: World, rounds: int) -> float:
    """Many small functional all-gathers at once, as of a DTensor each."""
    from torch.distributed import _functional_collectives as functional

    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # renamed in torch 2.13
    found = 0.0
    for _ in range(rounds):
        some = [gather(torch.full((4,), 1.0 + world.rank), 0, dist.group.WORLD) for _ in range(64)]
        found += sum(float(functional.wait_tensor(each).sum()) for each in some)
    return found


@pytest.mark.long
def test_many_functional_all_gathers() -> None:
    """With two threads a rank ends by `malloc(): unaligned tcache chunk detected`, sooner or later, or hangs."""
    assert run_on(4, gathered, 300, run=tiny("strategy.name=fsdp2"), timeout_s=600) == [64 * 40.0 * 300] * 4
