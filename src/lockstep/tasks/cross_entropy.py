"""Cross-entropy over a vocabulary, with one float32 matrix of the logits' size in memory where torch has three.

In: logits [N, V], at most float32, and targets int64 [N]. Out: float32 losses or their sum, bitwise equal to
`torch.nn.functional.cross_entropy` of `logits.float()`, as is the gradient.

torch casts the logits to float32, stores their log-probabilities, and in backward allocates two more matrices: zeros
with one entry per row, and the gradient. Here torch's own operations process a few rows at a time, and the gradient
overwrites the log-probabilities. Each row is computed independently, so the bits are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import has_torch_function_unary

from lockstep.data.batch import IGNORED
from lockstep.distributed.torch_internals import is_dtensor

LARGE = 1 << 21  # elements of a matrix (8 MiB); below this, splitting costs more than the memory is worth
PART = 1 << 18  # elements processed at once, which fit the processor's cache
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REDUCTIONS = {"none": 0, "sum": 2}


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str, label_smoothing: float = 0.0) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits [N, V], cast to float32, and targets [N], where IGNORED is skipped.
    `reduction`: none ([N]) or sum. Backward can run only once."""
    by_parts = logits.device.type == "cpu" and logits.dtype in _DTYPES and logits.numel() >= LARGE
    if by_parts and not label_smoothing and not is_dtensor(logits) and not has_torch_function_unary(logits):
        return _ByParts.apply(logits, targets, _REDUCTIONS[reduction])
    return torch.nn.functional.cross_entropy(
        logits.float(), targets, reduction=reduction, label_smoothing=label_smoothing
    )


class _ByParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, reduction: int) -> Tensor:
        logs = torch.empty(logits.shape, dtype=torch.float32)
        for part in _parts(logs):
            torch.ops.aten._log_softmax.out(logits[part].float(), 1, False, out=logs[part])
        losses, weight = torch.ops.aten.nll_loss_forward(logs, targets, None, reduction, IGNORED)
        ctx.save_for_backward(logs, targets, weight)
        ctx.reduction, ctx.dtype = reduction, logits.dtype
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
        logs, targets, weight = ctx.saved_tensors
        gradient = logs if ctx.dtype is torch.float32 else torch.empty(logs.shape, dtype=ctx.dtype)
        for part in _parts(logs):
            each = above[part] if above.dim() else above
            rows = logs[part]
            of_logs = torch.ops.aten.nll_loss_backward(each, rows, targets[part], None, ctx.reduction, IGNORED, weight)
            torch.ops.aten._log_softmax_backward_data.out(of_logs, rows, 1, torch.float32, out=rows)
            if gradient is not logs:
                gradient[part] = rows
        return gradient, None, None


def _parts(matrix: Tensor) -> Iterator[slice]:
    """Slices of rows to process at a time."""
    rows = max(1, PART // matrix.shape[1])
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))
