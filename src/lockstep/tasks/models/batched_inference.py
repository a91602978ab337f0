"""Many texts and an exported model: asked in batches of texts of like length, answered in the order of the texts.

In: rows of texts, one or two each. Out: an answer a row, as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

AT_ONCE = 32  # rows of a batch
SORTED = 16  # batches whose rows are sorted by length together

Row = Sequence[str]  # a text, or the two of a pair


def answers(
    rows: Sequence[Row], answer: Callable[[list[Row]], list[dict[str, Any]]], at_once: int = AT_ONCE
) -> Iterator[dict[str, Any]]:
    """What `answer` makes of each row."""
    for start in range(0, len(rows), at_once * SORTED):
        window = rows[start : start + at_once * SORTED]
        order = sorted(range(len(window)), key=lambda place: sum(map(len, window[place])))
        found: dict[int, dict[str, Any]] = {}
        for first in range(0, len(order), at_once):
            places = order[first : first + at_once]
            with torch.no_grad():
                told = answer([window[place] for place in places])
            found |= dict(zip(places, told, strict=True))
        yield from (found[place] for place in range(len(window)))


def padded(encoded: Sequence[dict[str, list[int]]], pads: dict[str, int]) -> dict[str, Tensor]:
    """Encoded texts as a batch, padded on the right as in training: name -> int64 [B, T], `attention_mask` beside."""
    longest = max(1, *(len(each["input_ids"]) for each in encoded))
    mask = [[1] * len(each["input_ids"]) for each in encoded]
    columns = {name: [each[name] for each in encoded] for name in pads if name in encoded[0]}
    columns["attention_mask"] = mask
    return {
        name: torch.tensor([row + [pads.get(name, 0)] * (longest - len(row)) for row in rows])
        for name, rows in columns.items()
    }
