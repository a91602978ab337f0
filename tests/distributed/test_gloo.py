"""Threads of a gloo group: as few as keep torch from freeing memory twice."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed import torch_internals
from lockstep.distributed.world import World
from lockstep.strategies.allreduce import AllReduce
from lockstep.training.evaluation import evaluate
from lockstep.training.session import gloo_threads
from support.harness import build_with_feed, run_on, tiny

pytestmark = pytest.mark.processes


def threads(world: World) -> list[int]:
    """Return the threads of four groups: the default one, that for decisions, a mesh's, and one formed afterwards."""
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


def test_a_class_that_inherits_has_one() -> None:
    class Mine(AllReduce):
        pass

    job = Job.of(tiny("strategy.name=allreduce"))
    assert job.strategy is AllReduce
    assert (gloo_threads(job), gloo_threads(replace(job, strategy=Mine))) == (2, 1)


def test_inexact_runs_use_the_gloo_settings() -> None:
    assert run_on(2, threads, run=tiny("strategy.name=ddp", "strategy.exact=false")) == [[1] * 4] * 2


def test_keywords_of_newer_torch_become_options_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.14 gives `enable_reconfigure`; any name of an option stands for it here."""
    module: Any = dist.distributed_c10d
    monkeypatch.setattr(module, "ProcessGroupGloo", module.ProcessGroupGloo)  # put back afterwards
    torch_internals.gloo_threads(1)
    options = module.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=30), group_name="g").options
    assert (options._threads, options._timeout, options.group_name) == (1, timedelta(seconds=30), "g")
    with pytest.raises(AttributeError):
        module.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=30), no_option=1)


def summed_column(world: World) -> list[list[float]]:
    matrix = torch.arange(12.0).view(4, 3)
    world.all_reduce(matrix[:, 0])
    return matrix.tolist()


def test_a_strided_view_is_summed_correctly() -> None:
    doubled = [[0.0, 1.0, 2.0], [6.0, 4.0, 5.0], [12.0, 7.0, 8.0], [18.0, 10.0, 11.0]]
    assert run_on(2, summed_column, run=tiny("strategy.name=ddp")) == [doubled] * 2


class Functional(TorchDispatchMode):
    """Counts functional collectives, and those of sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sparse = func.namespace == "c10d" and any(
            isinstance(x, torch.Tensor) and x.is_sparse for x in tree_leaves(args)
        )
        self.count += sparse or func.namespace.startswith("_c10d_functional")
        return func(*args, **(kwargs or {}))


def functional_ones(world: World, run: Run) -> int:
    """In two steps, with what a checkpoint, scores and the export take."""
    with Functional() as seen:
        task, strategy, feed = build_with_feed(run, world)
        strategy.dry_run(feed.longest())
        for step in range(2):
            strategy.train_step(feed.make(step), 1e-3)
        strategy.state.state_dict()
        evaluate(world, task, strategy, task.splits["validation"])
        strategy.state.export()
        strategy.close()
    return seen.count


@pytest.mark.parametrize("name", ["allreduce", "ddp"])
def test_strategies_with_two_threads_make_no_functional_collective(name: str) -> None:
    for keys in ((), ("precision=bf16", "model.dtype=bfloat16"), ("average.ema=0.9",)):
        run = tiny(f"strategy.name={name}", *keys)
        assert run_on(2, functional_ones, run) == [0, 0]


def test_the_control_fsdp2_makes_functional_collectives() -> None:
    run = tiny("strategy.name=fsdp2")
    assert min(run_on(2, functional_ones, run)) > 0


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
    """Functional all-gathers need one gloo thread: with two, a rank ends in `malloc(): unaligned tcache chunk detected`
    sooner or later, or hangs."""
    assert run_on(4, gathered, 300, run=tiny("strategy.name=fsdp2"), timeout_s=600) == [64 * 40.0 * 300] * 4
