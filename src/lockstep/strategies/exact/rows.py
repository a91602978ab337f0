"""Row-sparse gradients, and slots of rows for each rank.

In: the leaves' gradients of a large embedding, as (rows, values); the shapes of the tensors of a bucket. Out: a sum
bitwise equal to that of dense gradients, for a tenth of the memory traffic: each row's sum uses the same tree, and
adding the zeros of an untouched row changes nothing. And slots of equal length, one row of a matrix [W, N] per rank,
filled and emptied with a few copies per tensor at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.torch_internals import rows_of, values_of
from lockstep.strategies.exact.reduction_tree import Node, ReductionTree, Shares, layout_of

SMALL = 256  # rows; smaller embeddings stay dense


def row_sparse(model: nn.Module, device: torch.device, uses: Mapping[int, int]) -> set[str]:
    """Enable row-sparse gradients on the embeddings that support them; return the names of their weights. `uses`: id of
    a weight -> how often a forward uses it.

    Excluded: tied weights (their other use has dense gradients), and weights looked up twice (dense gradients add up
    per look-up, row-sparse ones token by token over all look-ups). On CUDA the dense kernels are deterministic and
    cheap.
    """
    if device.type != "cpu":
        return set()
    names: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    sparse = set()
    for name, module in model.named_modules():
        if type(module) is not nn.Embedding or names[id(module.weight)] > 1 or not module.weight.requires_grad:
            continue
        once = uses.get(id(module.weight)) == 1
        if once and module.max_norm is None and not module.scale_grad_by_freq and module.num_embeddings > SMALL:
            module.sparse = True
            sparse.add(f"{name}.weight")
    return sparse


def by_row(gradient: Tensor) -> Tensor:
    """Coalesce a leaf's gradient to one entry per row.

    Entries of a row are added in token order, as in the dense kernel; torch's `coalesce` uses another order, which
    changes bits.
    """
    if not gradient.is_sparse:  # embedding not used by this micro-batch
        return gradient.to_sparse(1).coalesce()
    rows, place = torch.unique(rows_of(gradient), return_inverse=True)
    values = values_of(gradient)
    summed = values.new_zeros(len(rows), values.shape[1]).index_add_(0, place, values)
    return _sparse(rows, summed, gradient.shape)


def rows_between(gradient: Tensor, first: int, end: int) -> Tensor:
    """Return the rows `first..end-1` of a coalesced gradient, numbered from 0."""
    rows = rows_of(gradient)
    mine = (rows >= first) & (rows < end)
    return _sparse(rows[mine] - first, values_of(gradient)[mine], torch.Size([end - first, *gradient.shape[1:]]))


def exchange_rows(
    nodes: dict[Node, Tensor], leaves: int, rank: int, ranks: int, shares: Shares | None = None
) -> Tensor:
    """Sum the partial nodes of one row-sparse tensor over ranks, in tree order. `shares` of the leaves: equal by
    default. Collective.

    Every rank receives all rows of all ranks: far fewer than the tensor has if a batch is small compared to the
    vocabulary.
    """
    layout = layout_of(leaves, ranks, shares)
    mine = [nodes[node] for node in layout[rank]]
    width = max(len(n) for n in layout)
    counts = torch.zeros(ranks, width, dtype=torch.int64)
    counts[rank, : len(mine)] = torch.tensor([values_of(t).shape[0] for t in mine])
    dist.all_reduce(counts)
    most = int(counts.sum(1).max())
    rows = torch.zeros(most, dtype=torch.int64)
    values = values_of(mine[0]).new_zeros(most, mine[0].shape[1])
    torch.cat([rows_of(t) for t in mine], out=rows[: int(counts[rank].sum())])
    torch.cat([values_of(t) for t in mine], out=values[: int(counts[rank].sum())])
    all_rows = [torch.empty_like(rows) for _ in range(ranks)]
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(all_rows, rows)
    dist.all_gather(all_values, values)
    tree = ReductionTree(leaves)
    for i in range(ranks):
        at = 0
        for node, count in zip(layout[i], counts[i].tolist(), strict=False):
            part = slice(at, at + count)
            tree.place(node, [_sparse(all_rows[i][part], all_values[i][part], mine[0].shape)])
            at += count
    return tree.root[0]


def _sparse(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


class RowSlots:
    """Slots with rank r's rows [r * E, (r + 1) * E) of each tensor, where E = ceil(rows / ranks), as DTensor shards
    them: the last ranks have fewer or none. Every rank has all scalars."""

    def __init__(self, shapes: Sequence[torch.Size], ranks: int) -> None:
        self.ranks, self._shapes = ranks, list(shapes)
        self._each = [-(-shape[0] // ranks) if shape else 1 for shape in shapes]  # rows per rank
        self._widths = [shape[1:].numel() for shape in shapes]
        self._starts: list[int] = []  # offset of each tensor's rows in a slot
        self.length = 0  # elements per slot
        for each, width in zip(self._each, self._widths, strict=True):
            self._starts.append(self.length)
            self.length += each * width

    def laid(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return whole tensors as slots [W, N], zero-padded."""
        slots = tensors[0].new_zeros(self.ranks, self.length)
        for tensor, column in zip(tensors, self._columns(slots), strict=True):
            if not tensor.dim():
                column.fill_(tensor)
            else:
                for rows, place in self._runs(tensor, column):
                    place.copy_(rows)
        return slots

    def own(self, slot: Tensor, rank: int) -> list[Tensor]:
        """Return one rank's rows of each tensor: views of its slot [N]."""
        parts = []
        for shape, each, width, start in zip(self._shapes, self._each, self._widths, self._starts, strict=True):
            rows = max(0, min(each, shape[0] - rank * each)) if shape else 1
            parts.append(slot[start : start + rows * width].view(rows, *shape[1:]) if shape else slot[start])
        return parts

    def take(self, slots: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the slots of all ranks [W, N] into whole tensors that have dimensions."""
        for tensor, column in zip(tensors, self._columns(slots), strict=True):
            for rows, place in self._runs(tensor, column):
                rows.copy_(place)

    def _columns(self, slots: Tensor) -> list[Tensor]:
        widths = [each * width for each, width in zip(self._each, self._widths, strict=True)]
        return list(slots.split(widths, dim=1))

    def _runs(self, tensor: Tensor, column: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of (rows of a tensor, their position in the slots): ranks with all their rows, then the one with
        fewer."""
        flat, count = tensor.reshape(len(tensor), -1), column.shape[1] // max(1, tensor[:1].numel())
        if not tensor.numel():
            return []
        full, rest = divmod(len(tensor), count)
        runs = [(flat[: full * count].view(full, -1), column[:full])]
        if rest:
            last = flat[full * count :].reshape(-1)
            runs.append((last, column[full, : len(last)]))
        return runs
