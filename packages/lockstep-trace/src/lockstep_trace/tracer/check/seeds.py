"""Reference for random numbers: a call of the model with another seed, in training and in evaluation mode.

In: a `ModuleCall`. Out: observations. A second seed should change what dropout does while the model trains, and nothing
when it is evaluated. Only outputs of the model are compared: noise in data, losses and optimizers is not detected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import replay
from .calls import ModuleCall, NotRecomputable
from .precision import distance_between, exactly, first_difference
from .rows import quiet


def seed(call: ModuleCall) -> list[dict[str, Any]]:
    """Compute the call with two seeds, in training and in evaluation mode."""
    if replay.is_compiled(call.module):
        raise NotRecomputable("a compiled model draws other random numbers than its modules do")
    replay.require_reproduced(call)
    return [*_training(call), *_evaluation(call)]


def _training(call: ModuleCall) -> list[dict[str, Any]]:
    inputs = call.args, call.kwargs
    one, other = (replay.run(replay.copied(call), inputs, call, seed=s) for s in (1, 2))
    masks = [(m, a, b) for (m, a), (n, b) in zip(one.dropped, other.dropped, strict=False) if m == n]
    if not masks or len(one.dropped) != len(other.dropped):
        return []
    distance = exactly(one, other) if len(one.floats) == len(other.floats) else 1.0
    observation = {"reference": "seed", "apart": distance, "masks": len(masks)}
    if all(torch.equal(a, b) for _, a, b in masks):
        return [observation | {"result": "differs", "same_masks": True, "module": masks[0][0], "operation": "dropout"}]
    return [observation | {"result": "same"}]


def _evaluation(call: ModuleCall) -> list[dict[str, Any]]:
    inputs = call.args, call.kwargs
    one, other = (replay.run(quiet(call, False), inputs, call, seed=s) for s in (1, 2))
    observation = {"reference": "seed in evaluation", "apart": exactly(one, other)}
    if not observation["apart"]:
        return [observation | {"result": "same"}]

    def differ(a: Tensor, b: Tensor) -> bool:
        return distance_between(a, b) > 0

    pair = (quiet(call, False), inputs), (quiet(call, False), inputs)
    module, operation = first_difference(*pair, call, differ, seed=1, other_seed=2)
    dropout = bool(one.dropped)
    return [observation | {"result": "differs", "module": module, "operation": operation, "dropout": dropout}]
