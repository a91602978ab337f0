"""One optimizer update compared with torch in this process: norm, clipping, weights that it skips, non-finite values,
and the weights that it writes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.run import Run
from lockstep.distributed.world import World
from lockstep.strategies.exact.gradient_sum import by_row
from lockstep.strategies.exact.update import FiniteCheck, Gradient, NotFinite, Part, clip_
from lockstep.strategies.observer import GradientRecorder
from lockstep.strategies.single import Single
from lockstep.training.data_loader import StepLoader
from support.harness import build, tiny


def parameters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((3, 4), (5,), ())]


def test_replicated_weights_count_once_in_the_norm() -> None:
    whole = [p.detach().clone() for p in parameters()]
    names = ["own", "shared", "other"]
    here = [Part("own", whole[0], whole[0], 1.0), Part("shared", whole[1], whole[1], 0.5)]
    there = [Part("other", whole[2], whole[2], 1.0), Part("shared", whole[1], whole[1], 0.5)]
    others: list[Tensor] = []
    Gradient(there, names, lambda squares: others.append(squares.clone()) or squares).norm()
    norm = Gradient(here, names, lambda squares: squares + others[0]).norm()
    wanted = torch.cat([each.reshape(-1) for each in whole]).double().norm().float()
    assert torch.allclose(norm, wanted, rtol=1e-6)
    alone = Gradient([Part("a", whole[0], whole[0], 0.0), Part("b", whole[1], whole[1])], ["a", "b"]).norm()
    assert torch.allclose(alone, whole[1].norm(), rtol=1e-6)  # another rank counts the first weight


@pytest.mark.parametrize("limit", [0.1, 1.0, 100.0])
def test_clipping_matches_torch(limit: float) -> None:
    ours, theirs = parameters(), parameters()
    for mine, other in zip(ours, theirs, strict=True):
        mine.grad, other.grad = mine.detach().clone(), other.detach().clone()
    norm = nn.utils.clip_grad_norm_(theirs, limit)
    clip_([p.grad for p in ours if p.grad is not None], norm, limit)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, other.grad)
    # a gradient below the limit is not scaled
    assert torch.equal(ours[0].grad, ours[0].detach()) == (limit > float(norm))


def test_unused_weights_get_no_gradient() -> None:
    used, unused, _ = parameters()
    parts = [Part("used", used, torch.ones(3, 4)), Part("unused", unused, torch.zeros(5))]
    gradient = Gradient(parts, ["unused", "used"])
    gradient.assign_to_params([0, 3])
    assert used.grad is not None
    assert unused.grad is None  # so torch's optimizers neither decay nor move it
    gradient.clear()
    assert used.grad is None


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), float("-inf")])
def test_a_nonfinite_norm_makes_no_update(norm: float) -> None:
    losses = torch.ones(4)
    skipping, stopping = FiniteCheck(stops=False, late=False), FiniteCheck(stops=True, late=False)
    assert skipping.check(3, losses, torch.tensor(2.0))  # control
    assert not skipping.check(3, losses, torch.tensor(norm))
    with pytest.raises(NotFinite):
        stopping.check(3, losses, torch.tensor(norm))


def test_row_sparse_gradients_are_dense_during_the_update() -> None:
    weight = nn.Parameter(torch.zeros(6, 2))
    for touched in ([1, 4], [0, 4], [5], []):
        whole = torch.zeros(6, 2)
        whole[touched] = torch.tensor([[1.0, 2.0]])
        rows = by_row(whole)
        assert rows.is_sparse
        gradient = Gradient([Part("weight", weight, rows)], ["weight"])
        gradient.assign_to_params([1])
        assert weight.grad is not None
        assert torch.equal(weight.grad, whole)
        gradient.clear()
        assert weight.grad is None


# -- whole steps in one process --------------------------------------------------------------------------------------


def stepped(run: Run, steps: int = 2) -> tuple[Single, list[float], dict[str, Tensor]]:
    """Return the strategy after some steps, their norms, and the last gradient before clipping."""
    task, strategy = build(run, World(run))
    assert isinstance(strategy, Single)
    strategy.observer = recorder = GradientRecorder(strategy.world)
    feed = StepLoader(task, strategy.own_micro_batches(), strategy.world.device)
    norms = [float(strategy.train_step(feed.make(step), 1e-3).grad_norm) for step in range(steps)]
    return strategy, norms, recorder.gradients


def still(*overrides: str) -> Run:
    config = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32}
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return tiny("strategy.name=single", *overrides, model={"type": "gpt2", "config": config})


def test_gradients_are_unscaled_before_the_norm() -> None:
    low, norms, _ = stepped(still("precision=fp16"))
    plain, wanted, _ = stepped(still())
    assert norms == pytest.approx(wanted, rel=0.02)
    low.close()
    plain.close()


def test_bfloat16_weights_are_rounded_masters_and_gradients_float32() -> None:
    strategy, _, seen = stepped(still("model.dtype=bfloat16", "precision=bf16"))
    start, _, _ = stepped(still("model.dtype=bfloat16", "precision=bf16"), steps=0)
    moved = 0
    for name, place in strategy.weights.named.items():
        master = strategy.weights.updated[name]
        assert master.dtype == torch.float32
        assert torch.equal(place, master.bfloat16()), name
        moved += not torch.equal(place, start.weights.named[name])
    assert moved > len(strategy.weights.named) // 2  # a weight of 1 moves by less than its last bit
    assert all(gradient.dtype == torch.float32 for gradient in seen.values())
    rounded = [name for name, gradient in seen.items() if torch.equal(gradient, gradient.bfloat16().float())]
    assert not rounded
    strategy.close()
    start.close()


def test_dropout_depends_on_step_and_micro_batch_and_repeats() -> None:
    run = tiny("strategy.name=single")
    task, strategy = build(run, World(run))
    batch = StepLoader(task, strategy.own_micro_batches(), strategy.world.device).make(0)
    losses: list[float] = []
    plain = task.loss_sum
    task.loss_sum = lambda outputs, targets: (
        losses.append(float(plain(outputs, targets).detach())) or plain(outputs, targets)
    )
    again = [replace(batch.micro_batches[0], index=k) for k in range(batch.count)]  # the same examples each time
    for step in (0, 1, 0):
        strategy.train_step(replace(batch, step=step, micro_batches=again), 0.0)
    first, other, once_more = losses[: batch.count], losses[batch.count : -batch.count], losses[-batch.count :]
    assert first == once_more
    assert len({*first, *other}) == 2 * batch.count
    strategy.close()
