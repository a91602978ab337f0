"""Tensors cut by rows, one slot a rank: where the rows that each rank answers for lie in memory that travels.

In: the shapes of the tensors of a bucket, and how many ranks. Out: slots of one length, a row of a matrix [W, N] each,
filled and emptied by a few copies a tensor, at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RowSlots:
    """Rank r has the rows [r * E, (r + 1) * E) of each tensor, E being rows / ranks, rounded up, as DTensor cuts it:
    the last ones have fewer or none. A single number (no dimension) every rank has."""

    def __init__(self, shapes: Sequence[torch.Size], ranks: int) -> None:
        self.ranks, self._shapes = ranks, list(shapes)
        self._each = [-(-shape[0] // ranks) if shape else 1 for shape in shapes]  # rows a rank
        self._widths = [shape[1:].numel() for shape in shapes]
        self._starts: list[int] = []  # where each tensor's rows begin in a slot
        self.length = 0  # numbers of a slot
        for each, width in zip(self._each, self._widths, strict=True):
            self._starts.append(self.length)
            self.length += each * width

    def laid(self, tensors: Sequence[Tensor]) -> Tensor:
        """Whole tensors as slots [W, N]; what is left of a slot is zero."""
        slots = tensors[0].new_zeros(self.ranks, self.length)
        for tensor, column in zip(tensors, self._columns(slots), strict=True):
            if not tensor.dim():
                column.fill_(tensor)
            else:
                for rows, place in self._runs(tensor, column):
                    place.copy_(rows)
        return slots

    def own(self, slot: Tensor, rank: int) -> list[Tensor]:
        """One rank's rows of each tensor: views of its slot [N]."""
        parts = []
        for shape, each, width, start in zip(self._shapes, self._each, self._widths, self._starts, strict=True):
            rows = max(0, min(each, shape[0] - rank * each)) if shape else 1
            parts.append(slot[start : start + rows * width].view(rows, *shape[1:]) if shape else slot[start])
        return parts

    def take(self, slots: Tensor, tensors: Sequence[Tensor]) -> None:
        """The rows of all ranks [W, N] into whole tensors that have dimensions."""
        for tensor, column in zip(tensors, self._columns(slots), strict=True):
            for rows, place in self._runs(tensor, column):
                rows.copy_(place)

    def _columns(self, slots: Tensor) -> list[Tensor]:
        widths = [each * width for each, width in zip(self._each, self._widths, strict=True)]
        return list(slots.split(widths, dim=1))

    def _runs(self, tensor: Tensor, column: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Rows of a tensor beside where they lie: those of the ranks that have all of theirs, and of one with fewer."""
        flat, count = tensor.reshape(len(tensor), -1), column.shape[1] // max(1, tensor[:1].numel())
        if not tensor.numel():
            return []
        full, rest = divmod(len(tensor), count)
        runs = [(flat[: full * count].view(full, -1), column[:full])]
        if rest:
            last = flat[full * count :].reshape(-1)
            runs.append((last, column[full, : len(last)]))
        return runs
