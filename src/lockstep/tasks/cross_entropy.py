"""Cross-entropy over a vocabulary, with one matrix of the logits' size in memory where torch has three.

In: float32 logits [N, V] and targets int64 [N]. Out: the losses, or their sum; the bits of
`torch.nn.functional.cross_entropy`, and of its gradient.

torch's backward keeps the log-probabilities and makes two more matrices: one of zeros with a number a row, and the
gradient. Here a few rows at a time go through torch's own two operations, and the gradient takes the place of the
log-probabilities. Every row's gradient depends on that row alone, so its bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import has_torch_function_unary

from lockstep.data.batch import IGNORED
from lockstep.distributed.torch_internals import is_dtensor

LARGE = 1 << 21  # numbers of a matrix (8 MiB); operations on a smaller one cost more than its memory
PART = 1 << 18  # numbers that go through at once, and stay in the processor's cache
_REDUCTIONS = {"none": 0, "sum": 2}


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str, label_smoothing: float = 0.0) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits [N, V] and targets [N], where IGNORED counts for nothing.
    `reduction`: none ([N]) or sum. The gradient can be asked for once."""
    by_parts = logits.device.type == "cpu" and logits.dtype is torch.float32 and logits.numel() >= LARGE
    if by_parts and not label_smoothing and not is_dtensor(logits) and not has_torch_function_unary(logits):
        return _ByParts.apply(logits, targets, _REDUCTIONS[reduction])  # type: ignore[no-untyped-call, no-any-return]
    return torch.nn.functional.cross_entropy(logits, targets, reduction=reduction, label_smoothing=label_smoothing)


class _ByParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, reduction: int) -> Tensor:
        logs = torch.log_softmax(logits, 1)
        losses, weight = torch.ops.aten.nll_loss_forward(logs, targets, None, reduction, IGNORED)
        ctx.save_for_backward(logs, targets, weight)
        ctx.reduction = reduction
        return losses  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logs, targets, weight = ctx.saved_tensors
        rows = max(1, PART // logs.shape[1])
        for start in range(0, len(logs), rows):
            part, labels = logs[start : start + rows], targets[start : start + rows]
            each = gradient[start : start + rows] if gradient.dim() else gradient
            sparse = torch.ops.aten.nll_loss_backward(each, part, labels, None, ctx.reduction, IGNORED, weight)
            torch.ops.aten._log_softmax_backward_data.out(sparse, part, 1, part.dtype, out=part)
        return logs, None, None
