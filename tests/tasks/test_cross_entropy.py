"""The cross-entropy over a vocabulary, which makes its gradient in place, held to torch's own bit by bit."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lockstep.data.batch import IGNORED
from lockstep.tasks.cross_entropy import LARGE, cross_entropy
from support.tensor_writes import Written

VOCABULARIES = (50_257, 30_522, 4099)


def drawn(vocabulary: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits of as many rows as make a large matrix, some far apart, and targets, every seventh IGNORED."""
    draw = torch.Generator().manual_seed(vocabulary)
    rows = -(-LARGE // vocabulary) + 3
    logits = scale * torch.randn(rows, vocabulary, generator=draw)
    logits[1] *= 100.0  # most of its probabilities are zero
    logits[2] = 0.0
    targets = torch.randint(vocabulary, (rows,), generator=draw)
    targets[::7] = IGNORED
    return logits, targets


def both(logits: Tensor, targets: Tensor, reduction: str, smoothing: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    """The losses and the gradient of the logits: ours, torch's."""
    results = []
    for function in (cross_entropy, functional.cross_entropy):
        leaf = logits.clone().requires_grad_()
        losses = function(leaf, targets, reduction=reduction, label_smoothing=smoothing)
        above = torch.rand(losses.shape, generator=torch.Generator().manual_seed(1)) / 3
        losses.backward(above)
        assert leaf.grad is not None
        results.append((losses.detach(), leaf.grad))
    return results


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_losses_and_gradients_have_the_bits_of_torch(reduction: str, vocabulary: int, scale: float) -> None:
    (loss, gradient), (torchs, right) = both(*drawn(vocabulary, scale), reduction)
    assert torch.equal(loss, torchs)
    assert torch.equal(gradient.view(torch.int32), right.view(torch.int32))  # of zeros the sign, too
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_rows_without_a_target_have_no_gradient(reduction: str) -> None:
    logits, targets = drawn(4099)
    (loss, gradient), (torchs, right) = both(logits, torch.full_like(targets, IGNORED), reduction)
    assert torch.equal(loss, torchs)
    assert float(loss.sum()) == 0.0
    assert torch.equal(gradient, right)
    assert not gradient.any()


def test_nonfinite_losses_equal_those_of_torch() -> None:
    logits, targets = drawn(4099)
    logits[3, 5], logits[4, 6], logits[8] = float("nan"), float("-inf"), float("inf")
    (loss, gradient), (torchs, right) = both(logits, targets, "none")
    assert torch.equal(loss.isnan(), torchs.isnan())
    assert loss.isnan().any()
    assert torch.equal(gradient.nan_to_num(7.0), right.nan_to_num(7.0))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_small_matrices_and_smoothed_labels_are_left_to_torch(smoothing: float) -> None:
    logits, targets = drawn(4099)
    for part in (logits, logits[:5]):
        (loss, gradient), (torchs, right) = both(part, targets[: len(part)], "sum", smoothing)
        assert torch.equal(loss, torchs)
        assert torch.equal(gradient, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_logits_of_less_precision_are_made_float32(reduction: str, dtype: torch.dtype) -> None:
    logits, targets = drawn(30_522)
    leaf, theirs = (logits.to(dtype).requires_grad_() for _ in range(2))
    loss = cross_entropy(leaf, targets, reduction)
    right = functional.cross_entropy(theirs.float(), targets, reduction=reduction)
    assert loss.dtype is torch.float32
    assert torch.equal(loss, right)
    loss.backward(torch.full_like(loss, 0.3))
    right.backward(torch.full_like(right, 0.3))
    assert leaf.grad is not None
    assert theirs.grad is not None
    assert leaf.grad.dtype is dtype
    assert torch.equal(leaf.grad, theirs.grad)


def test_small_logits_of_less_precision_are_made_float32() -> None:
    logits, targets = drawn(4099)
    small = logits[:5].bfloat16()
    assert torch.equal(cross_entropy(small, targets[:5], "sum"), cross_entropy(small.float(), targets[:5], "sum"))


def most(ours: bool, logits: Tensor, targets: Tensor) -> float:
    """The memory that losses and gradient took at most, as multiples of the logits in float32."""
    leaf = logits.clone().requires_grad_()
    with Written() as memory:
        if ours:
            cross_entropy(leaf, targets, "sum").backward()
        else:
            functional.cross_entropy(leaf.float(), targets, reduction="sum").backward()
    return memory.most / (logits.numel() * 4)


@pytest.mark.parametrize(("dtype", "more"), [(torch.float32, 0.0), (torch.bfloat16, 0.5)])
def test_one_matrix_is_allocated_instead_of_three(dtype: torch.dtype, more: float) -> None:
    logits, targets = drawn(50_257)
    assert 1.0 + more <= most(True, logits.to(dtype), targets) < 1.4 + more
    assert most(False, logits.to(dtype), targets) > 2.9  # the control


def test_a_second_backward_is_refused() -> None:
    logits, targets = drawn(4099)
    loss = cross_entropy(logits.requires_grad_(), targets, reduction="sum")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
