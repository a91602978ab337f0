"""Pad training texts to one of a few lengths, so that micro-batches have few shapes (`model.compile: whole`).

In: the lengths of a run's texts, or one micro-batch. Out: the lengths to pad to, chosen from the data alone, and the
micro-batch padded to the smallest of them that fits. Neither depends on ranks, so the padded micro-batch is part of
what a run computes. All padding is on the right and has no targets, so the numbers change only by rounding.

Letters: B examples, T padded length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.data.batch import IGNORED, MicroBatch

if TYPE_CHECKING:
    from torch import Tensor

MOST = 4  # lengths that are chosen; each is compiled separately, which takes about a minute on a GPU
PAYS = 0.95  # another length must reduce the padded tokens to this share
MULTIPLE = 8  # of lengths; the longest text's length is used as it is, since a model may have no more positions
PADDED = ("input_ids", "attention_mask", "token_type_ids")  # inputs that can be padded


def fit(lengths: Sequence[int], longest: int) -> int:
    """The length to which texts of at most `longest` tokens are padded."""
    return next((length for length in lengths if length >= longest), longest)


def choose(micro_batches: Iterable[tuple[int, int]], longest: int) -> list[int]:
    """Choose the lengths that need the fewest padded tokens. `micro_batches`: examples and longest text of each;
    `longest`: of all texts."""
    steps = [*range(MULTIPLE, longest, MULTIPLE), longest]
    examples = np.zeros(len(steps), dtype=np.int64)
    for count, most in micro_batches:
        examples[np.searchsorted(steps, most)] += count
    ends, sizes = np.concatenate([[0], np.cumsum(examples)]), np.asarray(steps)
    # least[j]: fewest padded tokens of all texts that fit into length j, by the lengths chosen so far and j
    least, chosen = ends[1:] * sizes, [[i] for i in range(len(steps))]
    best = chosen[-1]
    for _ in range(MOST - 1):
        before = least[-1]
        costs = least[None] + (ends[1:, None] - ends[None, 1:]) * sizes[:, None]  # [length, length before it]
        costs[np.triu_indices(len(steps))] = np.iinfo(np.int64).max
        costs[0, 0] = least[0]
        places = costs.argmin(1)
        chosen = [[*chosen[i], j] if i < j else [j] for j, i in enumerate(places.tolist())]
        least = costs[np.arange(len(steps)), places]
        if least[-1] > PAYS * before:
            break
        best = chosen[-1]
    return [steps[i] for i in best]


def widened(micro: MicroBatch, lengths: Sequence[int], pad_token: int, by_token: bool) -> MicroBatch:
    """Pad a micro-batch in host memory to one of `lengths`. `by_token`: whether its targets are [B, T]."""
    mask = micro.inputs["attention_mask"]
    missing = fit(lengths, mask.shape[1]) - mask.shape[1]
    assert not bool((mask[:, 1:] > mask[:, :-1]).any()), "padding is expected on the right"
    if not missing:
        return micro
    inputs = {name: _longer(v, missing, pad_token if name == "input_ids" else 0) for name, v in micro.inputs.items()}
    targets = _longer(micro.targets, missing, IGNORED) if by_token else micro.targets
    return MicroBatch(micro.index, inputs, targets, micro.sources)


def padded_left(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Move the padding of right-padded inputs [B, T] to the left, by their `attention_mask`."""
    mask = inputs["attention_mask"]
    width = mask.shape[1]
    place = (np.arange(width) + mask.sum(1, keepdims=True)) % width  # [B, T]
    return {name: np.take_along_axis(values, place, 1) for name, values in inputs.items()}


def _longer(tensor: Tensor, missing: int, value: int) -> Any:
    from torch.nn.functional import pad

    return pad(tensor, (0, missing), value=value)
