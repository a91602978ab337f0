"""Counts the gradients that a rank holds while it adds a step's micro-batches over the tree, tensor by tensor."""

import time
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed.system_metrics import tensor_bytes
from lockstep.distributed.world import World
from lockstep.strategies import sharded_optimizer
from lockstep.strategies.exact.gradient_sum import most_held
from support.harness import build_with_feed, run_on, tiny
from support.tensor_writes import Written

# Many small matrices and short texts, so that temporary results are small beside a full gradient.
MODEL = {"type": "gpt2", "config": {"n_layer": 8, "n_head": 2, "n_embd": 192, "n_positions": 32}}
DATA = {"source": "builtin/emotion", "max_length": 4, "limit": 100}
BUCKET = 0.5  # MiB, so that buckets in flight are small as well
NEAR = 0.2  # tolerance, in full gradients
LEAVES = (1, 2, 8)  # micro-batches per rank
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "allreduce": (2, {"bucket_cap_mb": BUCKET}),
    "ddp": (2, {"bucket_cap_mb": BUCKET}),
    "fsdp2": (2, {"gather": "step"}),
    "pipeline": (2, {}),
}
FORMULA = {"ddp": [2, 2, 4], "pipeline": [2, 3, 5]}  # a pipeline stage runs all micro-batches: two, four and sixteen


def runs_of(name: str, ranks: int, options: dict[str, Any]) -> list[Run]:
    counts = [leaves * ranks for leaves in LEAVES]
    strategy = {"name": name, "options": options}
    return [tiny(strategy=strategy, data=DATA, model=MODEL, batch_size=n, micro_batches=n) for n in counts]


def at_most(world: World, runs: list[Run]) -> list[float]:
    """Return, for each run, the peak memory written in a step before its update, in full gradients of this model."""
    sharded_optimizer.BUCKET_BYTES = int(BUCKET * 2**20)
    found = []
    for run in runs:
        _, strategy, feed = build_with_feed(run, world)
        strategy.train_step(feed.make(0), 1e-3)
        batch, most = feed.make(1), []
        with Written() as seen:
            hook = register_optimizer_step_pre_hook(lambda *_, most=most, seen=seen: most.append(seen.most))
            strategy.train_step(batch, 1e-3)
            hook.remove()
        found.append(most[0] / (4 * sum(p.numel() for p in strategy.model.parameters())))
        strategy.close()
    return found


def of_partial_sums(run: Run, ranks: int) -> float:
    job = Job.of(run, ranks)
    return job.strategy.memory.partial_sums(job)


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_the_formula_gives_the_number_of_partial_sums(name: str) -> None:
    ranks, options = CASES[name]
    runs = runs_of(name, ranks, options)
    formula = FORMULA.get(name, [1, 1, 3])
    parts = ranks if name == "pipeline" else 1
    assert [1 + parts * of_partial_sums(run, ranks) / 4 for run in runs] == formula
    for rank in run_on(ranks, at_most, runs):
        for held, most in zip(rank, formula, strict=True):
            assert held < most + NEAR, rank
        assert rank[-1] > formula[-1] - NEAR, rank  # the formula is no looser than that


def between(world: World, run: Run) -> float:
    """Return the most that a rank holds between two micro-batches beyond what it holds between steps, in full gradients
    of its trained weights."""
    _, strategy, feed = build_with_feed(run, world)
    strategy.train_step(feed.make(0), 1e-3)
    batch, held = feed.make(1), []
    rest = tensor_bytes()

    def sample(*_: Any) -> None:
        time.sleep(0.3)  # until gloo's threads free their tensors
        held.append(tensor_bytes() - rest)

    hook = strategy.model.register_forward_pre_hook(sample)
    strategy.train_step(batch, 1e-3)
    hook.remove()
    own = 4 * sum(p.numel() for p in strategy.model.parameters())
    strategy.close()
    return max(held) / own


@pytest.mark.processes
def test_partial_sums_between_rounds_of_fsdp() -> None:
    """Eight micro-batches run in four rounds of two: the sums of 0..3 and 4..5 wait for 6 and 7, each half a gradient
    per rank."""
    run = tiny("strategy.name=fsdp2", data=DATA, model=MODEL, batch_size=8, micro_batches=8)
    assert of_partial_sums(run, 2) == 4 / 2  # in addition to the one counted as the gradient
    for rank in run_on(2, between, run):
        assert rank == pytest.approx(2 / 2, abs=NEAR)


def test_partial_sums_of_a_share() -> None:
    assert [most_held(n, 1) for n in (1, 2, 4, 8, 16, 32)] == [1, 1, 2, 3, 4, 5]
    assert [most_held(n, 1, whole_leaf=True) for n in (1, 2, 4, 8, 16, 32)] == [1, 2, 3, 4, 5, 6]
    assert [most_held(16, ranks) for ranks in (2, 4, 8, 16)] == [3, 2, 1, 1]
    assert most_held(8, 3) == 2  # 0 1 | 2 3 4 | 5 6 7
