"""`fsdp2` with `gather: step`: the bits of `single`, a state that both ways of gathering can load, and the rule that
chooses between them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config.run import Run, load
from lockstep.config.schedules import learning_rate
from lockstep.data.job import Job, strategy_class
from lockstep.distributed.world import World
from lockstep.strategies.fsdp2 import FSDP2
from lockstep.strategies.sharded_optimizer import ShardedOptimizer, ShardedWeights
from lockstep.training import session
from lockstep.training.resolve import resolve_strategy
from support import odd_models
from support.fsdp2_runs import of
from support.harness import TINY, build, build_with_feed, digest, run_on, tiny
from support.marks import slow
from support.messages import raises
from support.saving import job_of

STEP = {"name": "fsdp2", "options": {"gather": "step"}}
PIECE = {"name": "fsdp2", "options": {"gather": "piece"}}


@pytest.fixture(scope="module")
def single() -> dict[str, dict[str, Any]]:
    return {p: of(1, "strategy.name=single", f"precision={p}") for p in ("fp32", "bf16")}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "precision"), [(1, "fp32"), (2, "bf16"), (3, "fp32"), slow(4, "bf16"), slow(4, "fp32")]
)
def test_gather_step_has_the_bits_of_single(ranks: int, precision: str, single: dict) -> None:
    found = of(ranks, f"precision={precision}", strategy=STEP)
    for key in ("digest", "loss", "norm", "exported"):
        assert found[key] == single[precision][key], key


@pytest.mark.processes
def test_without_exact_they_are_equal_to_rounding() -> None:
    sgd = ("optim.name=sgd", "optim.learning_rate=0.1")
    alone, found = of(1, "strategy.name=single", *sgd), of(3, *sgd, strategy=STEP | {"exact": False})
    assert found["norm"] == pytest.approx(alone["norm"], rel=2e-6)
    assert found["digest"] != alone["digest"]


def odd_steps(world: World, runs: list[Run]) -> list[tuple[list[float], str]]:
    found = []
    for run in runs:
        _, strategy, feed = build_with_feed(run, world)
        norms = []
        for step in range(4):
            odd_models.step = step
            norms.append(float(strategy.train_step(feed.make(step), 0.01).grad_norm))
        found.append((norms, digest(strategy.state.state_dict())))
        strategy.close()
    return found


@pytest.mark.processes
def test_weights_that_some_micro_batches_use_and_weights_of_one_number() -> None:
    tasks = [{"name": f"support.odd_models.{name}"} for name in ("Task", "Number")]
    alone = [tiny("strategy.name=single", task=task) for task in tasks]
    ours = [tiny(task=task, strategy=STEP) for task in tasks]
    assert run_on(3, odd_steps, ours)[0] == run_on(1, odd_steps, alone)[0]


def two_steps_each(world: World, runs: list[Run]) -> list[tuple[str, str]]:
    """Resume each run from the checkpoint of the previous one; return (strategy class, digest after two steps) of
    each."""
    found = []
    for i, run in enumerate(runs):
        _, strategy, feed = build_with_feed(run, world)
        checkpoints = Checkpoints(job_of(run), world, 6)
        step, notes = checkpoints.resume(strategy.state)
        assert (step, notes) == (2 * i, [])
        for t in (step, step + 1):
            strategy.train_step(feed.make(t), learning_rate(run.optim, t, 6))
        checkpoints.save(step + 2, strategy.state)
        checkpoints.settle()
        found.append((type(strategy).__name__, digest(strategy.state.state_dict())))
        strategy.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resume_may_switch_gather(precision: str, tmp_path: Path) -> None:
    """A run may switch between the two ways of gathering at a resume; in fp16 the state includes the loss scale."""
    one, two = (
        [tiny(f"output={tmp_path}/{name}", f"precision={precision}", strategy=strategy) for strategy in ways]
        for name, ways in (("one", [{"name": "single"}] * 3), ("two", [STEP, PIECE, STEP]))
    )
    alone, ours = run_on(1, two_steps_each, one)[0], run_on(3, two_steps_each, two)[0]
    assert [name for name, _ in ours] == ["ShardedOptimizer", "FSDP2", "ShardedOptimizer"]
    assert [found for _, found in ours] == [found for _, found in alone]


# -- the choice between the two --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "found"),
    [
        (STEP, ShardedOptimizer),
        (PIECE, FSDP2),
        ({"options": {"gather": "micro_batch"}}, FSDP2),
        ({"options": {"cpu_offload": True}}, None),
        ({"exact": False}, None),
    ],
)
def test_gather_and_fsdp_options_are_obeyed(strategy: dict, found: type | None) -> None:
    """`gather` decides; without it, an option of FSDP or `exact: false` chooses FSDP, without looking at memory."""
    run = tiny(strategy={"name": "fsdp2"} | strategy)
    assert resolve_strategy(run, 2) is (found or FSDP2)
    assert not strategy_class(run).memory.needs_choice(Job.of(run))


def decided(run: Run, processes: int, memory: int) -> str:
    assert strategy_class(run).memory.needs_choice(Job.of(run))
    return FSDP2.memory.choose(Job.of(run, processes), 100, 100, memory).strategy.options["gather"]


def test_by_default_step_is_chosen_if_it_fits_into_half_the_memory() -> None:
    """Without `gather` and FSDP options, `step` is chosen if it fits into half the memory. With 100 parameters and
    eight micro-batches it takes 4 + 4 + 8 / n bytes per parameter, and 4 for each waiting partial sum."""
    run = load(None, ["strategy.name=fsdp2"], TINY)
    for processes, bytes_each in ((1, 4 + 4 + 2 * 4 + 8), (2, 4 + 4 + 4 + 4), (4, 4 + 4 + 2), (8, 4 + 4 + 1)):
        assert decided(run, processes, 2 * 100 * bytes_each) == "step"
        assert decided(run, processes, 2 * 100 * bytes_each - 1) == "micro_batch"


def ranks_of_unlike_memory(world: World, run: Run) -> str:
    task, strategy = build(run, world)
    strategy.close()
    session.capacity = lambda device, sharing: 10**12 if world.rank else 10  # type: ignore[assignment]
    return session.resolve_by_memory(Job.of(run, world.size), task, world).run.strategy.options["gather"]


@pytest.mark.processes
def test_the_smallest_memory_decides_for_all_ranks() -> None:
    run = load(None, ["strategy.name=fsdp2"], TINY)
    assert run_on(2, ranks_of_unlike_memory, run) == ["micro_batch", "micro_batch"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gather": "epoch"}, ("LS4071", "'epoch'", "micro_batch")),
        ({"gather": ["step"]}, ("LS4071",)),
        ({"gather": "step", "replicate": 2}, ("LS4072", "strategy.options.replicate")),
        ({"gather": "step", "cpu_offload": True}, ("LS4072", "strategy.options.cpu_offload")),
        ({"gather": "step", "tensor_parallel": 2}, ("LS4072", "strategy.options.tensor_parallel")),
    ],
)
def test_unsupported_options_are_refused(options: dict, said: tuple[str, ...]) -> None:
    with raises(*said):
        resolve_strategy(tiny(strategy={"name": "fsdp2", "options": options}), 4)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_scalar_weight_counts_once_in_the_norm(ranks: int) -> None:
    """A scalar weight, which every rank holds, counts once in the norm, as do the rows that only one rank holds."""
    matrix, number = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.tensor(3.0)
    model = nn.ParameterDict({"matrix": nn.Parameter(matrix), "number": nn.Parameter(number)})
    squares = torch.zeros(())
    for rank in range(ranks):
        world: Any = SimpleNamespace(rank=rank, size=ranks, all_reduce=lambda tensor: tensor)
        weights = ShardedWeights(model, False, world, Any, Any)
        gradients = [p.detach() for p in weights.updated.values()]
        squares += weights.gradient(gradients).norm().square()
    assert torch.allclose(squares.sqrt(), torch.cat([matrix.reshape(-1), number[None]]).norm(), rtol=1e-6)
