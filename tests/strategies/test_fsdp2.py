"""FSDP2's options (hybrid sharding, tensor parallelism, resharding, offload, precision) and what a rank holds in
memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lockstep.config.plugins import find
from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed import torch_internals
from lockstep.distributed.world import World
from lockstep.strategies.engines.fsdp import TreeScatter
from lockstep.strategies.fsdp2 import FSDP2
from lockstep.tasks.models import padding
from lockstep.tasks.models.model_configs import ModelChoice
from lockstep.training.data_loader import StepLoader
from support.fsdp2_runs import LLAMA, of
from support.harness import TINY, build, run_on, tiny
from support.messages import raises
from support.tensor_writes import Written


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return of(1, "strategy.name=single")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, {"replicate": 2}),
        (2, {"reshard_after_forward": False}),
        (4, {"reshard_after_forward": 2}),
        (2, {"cpu_offload": True}),
        (2, {"param_dtype": "fp32", "reduce_dtype": "fp32"}),
    ],
)
def test_options_keep_the_bits(ranks: int, options: dict, single: dict) -> None:
    found = of(ranks, strategy={"name": "fsdp2", "options": options})
    assert found["digest"] == single["digest"]
    assert found["norm"] == single["norm"]
    assert found["exported"] == single["exported"]


XLM = {"n_layers": 2, "n_heads": 2, "emb_dim": 32, "max_position_embeddings": 32}


@pytest.mark.processes
@pytest.mark.parametrize("family", ["xlm", "flaubert"])
def test_gradients_of_values_used_outside_a_block_are_complete(family: str) -> None:
    """XLM adds an attention's input to its output outside of the attention: the gradient sums four terms, of which FSDP
    would see three."""
    model = {"type": family, "config": XLM}
    one = of(1, "strategy.name=single", "micro_batches=4", model=model)
    found = of(2, "strategy.name=fsdp2", "micro_batches=4", model=model)
    assert found["digest"] == one["digest"]
    assert found["loss"] == one["loss"]
    assert found["norm"] == one["norm"]


def groups_of(world: World, run: Run) -> tuple[int, int]:
    """Return how many process groups `build` forms, and how many of them outside of `World.forming`."""
    forming, within, joined = World.forming, set[Any](), set(torch_internals.groups())

    @contextmanager
    def noted(world: World) -> Iterator[None]:
        before = set(torch_internals.groups())
        with forming(world):
            yield
        within.update(set(torch_internals.groups()) - before)

    World.forming = noted  # type: ignore[method-assign]
    build(run, world)
    formed = set(torch_internals.groups()) - joined
    return len(formed), len(formed - within)


@pytest.mark.processes
@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "fsdp2", "options": {"replicate": 2}},
        {"name": "fsdp2", "options": {"tensor_parallel": 2}, "tensor_leaves": 2},
        {"name": "fsdp2", "options": {"tensor_parallel": 2}, "exact": False},
        {"name": "pipeline", "options": {"stages": 2}},
    ],
)
def test_strategies_form_groups_that_survivors_can_abort(strategy: dict) -> None:
    """After a rank failure, survivors abort the connections of groups that were formed within `forming`, so every group
    must be."""
    model = LLAMA if "tensor_parallel" in strategy["options"] else TINY["model"]
    for formed, outside in run_on(4, groups_of, tiny("micro_batches=4", strategy=strategy, model=model)):
        assert formed
        assert outside == 0


def order_of(world: World, run: Run) -> list[str]:
    """Return the order of events in backward: "into i" when block i's input gradient is computed, "out" when a bucket
    is sent."""
    task, strategy = build(run, world)
    events: list[str] = []
    for i, block in enumerate(strategy.model.transformer.h):
        block.register_forward_hook(
            lambda _, args, out, i=i: out.register_hook(lambda gradient: events.append(f"into {i}")) and None
        )
    for scatter in strategy.scatters:
        scatter.start = lambda leaves, scatter=scatter, start=scatter.start: (start(leaves), events.clear())
    scattered = TreeScatter.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeScatter, "__call__", lambda *a, **k: (events.append("out"), scattered(*a, **k))[1])
        strategy.train_step(StepLoader(task, strategy.own_micro_batches(), world.device).make(0), 1e-3)
    strategy.close()
    return events


@pytest.mark.processes
def test_gradients_of_a_block_are_sent_during_backward() -> None:
    run = tiny("strategy.name=fsdp2", "micro_batches=2")
    found = run_on(2, order_of, run)[0]
    assert found == ["into 1", "out", "into 0", "out", "out"]


@pytest.mark.processes
def test_replicas_of_unequal_shares_keep_the_bits() -> None:
    """Two replicas of two shards each run four and five of nine micro-batches, with padding micro-batches."""
    nine = ("micro_batches=9", "batch_size=18")
    found = of(4, "strategy.name=fsdp2", "strategy.options.replicate=2", *nine)
    assert found["digest"] == of(1, "strategy.name=single", *nine)["digest"]


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "extra"), [(2, ()), (4, ())])
def test_the_engine_s_own_tensor_parallelism_is_equal_to_rounding(ranks: int, extra: tuple) -> None:
    sgd = {"optim": {"name": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.5}, "model": LLAMA}
    alone = of(1, "strategy.name=single", **sgd)
    found = of(ranks, strategy={"name": "fsdp2", "exact": False, "options": {"tensor_parallel": 2}}, **sgd)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert found["norm"] == pytest.approx(alone["norm"], rel=2e-6)
    for key, weight in alone["weights"].items():
        assert (found["weights"][key] - weight).abs().max() <= 1e-6, key
    placements, _ = found["held"]["model.layers.0.mlp.up_proj.weight"]
    assert len(placements) == 2


@pytest.mark.processes
def test_every_rank_holds_only_its_shard(single: dict) -> None:
    whole = sum(count for _, count in single["held"].values())
    found = of(4, "strategy.name=fsdp2")
    assert found["local"] < whole / 4 * 1.02
    assert all(placements is not None for placements, _ in found["held"].values())


def written(world: World, run: Run) -> tuple[int, int]:
    """Return the peak bytes written while building, and the model's size in bytes."""
    task = find("tasks", run.task.name)
    padding.unsupported_reason(ModelChoice.of(run), task.head)  # a start tries a small model before any rank exists
    with Written() as seen:
        _, strategy = build(run, world)
    size = 4 * strategy.weights.parameter_count
    strategy.close()
    return seen.most, size


@pytest.mark.processes
def test_only_rank_0_holds_the_whole_model() -> None:
    """Other ranks hold a quarter of the model, plus one weight being sent, or two until a thread frees one. The
    system's page count once read 0.71, because freed memory was kept from before the build: benchmarks/log.md,
    "Memory"."""
    large = {"type": "gpt2", "config": {"n_layer": 8, "n_head": 4, "n_embd": 128, "n_positions": 32}}
    run = tiny("strategy.name=fsdp2", model=large)
    (first, size), *others = run_on(4, written, run)
    assert size < first < 1.4 * size  # control: the measurement shows a full copy
    for most, _ in others:
        assert 0.25 * size <= most < 0.4 * size, f"{most / size:.2f} of the model"


def test_written_memory_counts_until_it_is_freed() -> None:
    with Written() as seen:
        whole = torch.empty(1000)
        assert seen.most == 0
        whole[:100] = 1
        assert seen.most == 400
        others = [torch.ones(500) for _ in range(3)]  # 500 numbers each
        assert seen.most == 6400
        del whole, others
        torch.zeros(1500)
    assert seen.most == 6400


@pytest.mark.processes
def test_fsdps_mixed_precision_option_has_its_effect(single: dict) -> None:
    options = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    found = of(2, strategy={"name": "fsdp2", "options": options})
    assert found["dtypes"] == {torch.float32}  # the sharded weights; gathered ones are bf16
    assert found["loss"] == pytest.approx(of(1, "strategy.name=single", "precision=bf16")["loss"], rel=2e-2)
    assert found["loss"] != single["loss"]


@pytest.mark.processes
def test_the_control_fsdps_own_reduction_has_other_bits(single: dict) -> None:
    assert of(3, "strategy.name=fsdp2", "strategy.exact=false")["digest"] != single["digest"]


@pytest.mark.parametrize(
    ("options", "ranks", "said"),
    [
        ({"shards": 2}, 2, ("LS4070",)),
        ({"replicate": 2}, 3, ("LS4077", "3", "2")),
        ({"replicate": 2}, 2, ("LS4078",)),
        ({"replicate": 0}, 2, ("LS4076",)),
        ({"param_dtype": "fp8"}, 2, ("LS4080", "strategy.options.param_dtype")),
        ({"reshard_after_forward": "no"}, 2, ("LS4079",)),
        ({"tensor_parallel": 2}, 2, ("LS4085", "strategy.tensor_leaves", "2")),
    ],
)
def test_unsupported_options_are_refused(options: dict, ranks: int, said: tuple[str, ...]) -> None:
    with raises(*said):
        FSDP2.check(Job.of(tiny(strategy={"name": "fsdp2", "options": options}), ranks))


@pytest.mark.parametrize(
    ("model", "said"),
    [({"model": LLAMA}, ("LS4104", "2", "num_key_value_heads")), ({}, ("LS4103", "gpt2"))],
)
def test_models_that_tensor_parallelism_cannot_shard_are_refused(model: dict, said: tuple[str, ...]) -> None:
    strategy = {"name": "fsdp2", "exact": False, "options": {"tensor_parallel": 4}}
    with raises(*said):
        FSDP2.check(Job.of(tiny(strategy=strategy, **model), 4))
