"""The mean of several checkpoints, as one to load from.

In: saved states, the oldest first. Out: a `Saved` whose weights are their mean, number by number and in their order,
and whose other entries are those of the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.distributed.sharded import Saved, local


class Mean(Saved):
    """Weights that are the same in all of them stay the same bits; a step of the mean rounds three times, each number
    by itself, so that it does not matter how tensors are cut."""

    def __init__(self, saved: Sequence[Saved]) -> None:
        self.saved = saved

    def __contains__(self, name: str) -> bool:
        return name in self.saved[-1]

    @torch.no_grad()
    def read(self, targets: Mapping[str, Tensor]) -> None:
        weights = {name: t for name, t in targets.items() if name.startswith("model.") and t.is_floating_point()}
        self.saved[0].read(weights)
        arriving = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        for number, each in enumerate(self.saved[1:], 2):
            each.read(arriving)
            for name, tensor in weights.items():
                mean, new = local(tensor).float(), local(arriving[name]).float()
                local(tensor).copy_(mean + (new - mean).div_(number))
        self.saved[-1].read({name: tensor for name, tensor in targets.items() if name not in weights})
