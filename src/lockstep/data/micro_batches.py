"""Cut a global batch into micro-batches of equal padded cost: a pure function of the lengths.

In: the length of each example of a step. Out: M groups of positions; group k becomes micro-batch k.
The gradient of a step is the same sum however its examples are grouped, so grouping by length inside a step is free:
no change of sampling, as grouping by length over the data set would be.
"""

from __future__ import annotations

import numpy as np


def cut(lengths: np.ndarray, micro_batches: int) -> list[np.ndarray]:
    """`micro_batches` groups of positions into `lengths`, whose costs (examples x longest) are as equal as contiguous
    cuts allow.

    The examples are sorted by length (stably) and cut where the largest cost is smallest. A group is empty only
    when there are fewer examples than micro-batches. The longest examples come first.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    count = len(order)
    filled = min(micro_batches, count)
    # Bisect the cost that the dearest micro-batch may have; micro-batches are filled greedily from the longest example
    # on.
    low, high = int(descending[0]), int(descending[0]) * count
    while low < high:
        middle = (low + high) // 2
        if len(_bounds(descending, middle, filled)) <= filled:
            high = middle
        else:
            low = middle + 1
    ends = _bounds(descending, low, filled)
    starts = [0, *ends[:-1]]
    groups = [order[a:b] for a, b in zip(starts, ends, strict=True)]
    while len(groups) < filled:  # greedy needed fewer: halve the largest, which costs nothing
        largest = max(range(len(groups)), key=lambda i: len(groups[i]))
        group = groups[largest]
        groups[largest : largest + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
    return groups + [order[:0]] * (micro_batches - filled)


def _bounds(descending: np.ndarray, budget: int, micro_batches: int) -> list[int]:
    """Ends of the greedy micro-batches of at most `budget` padded tokens each; stops once more than `micro_batches` are
    needed."""
    ends: list[int] = []
    at = 0
    while at < len(descending) and len(ends) <= micro_batches:
        at = min(len(descending), at + max(1, budget // int(descending[at])))
        ends.append(at)
    return ends


def padded_cost(lengths: np.ndarray, groups: list[np.ndarray]) -> int:
    """Tokens including padding when each group is padded to its longest example."""
    return int(sum(len(g) * lengths[g].max() for g in groups if len(g)))


def by_chance(examples: int, micro_batches: int) -> list[np.ndarray]:
    """Groups of equal counts in the order the examples came: what cutting without regard to length is."""
    return np.array_split(np.arange(examples), micro_batches)
