"""The quick start: the default run of a command without a run file.

In: the keys from the command line. Out: values that replace a run file, without the ones that conflict with those keys.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lockstep.config.sections import ALONE
from lockstep.config.written import keys_of

QUICK_START: dict[str, Any] = {
    "name": "quickstart",
    "data": {"source": "builtin/emotion", "max_length": 64},
    "model": {
        "type": "gpt2",
        "config": {
            "n_layer": 2,
            "n_head": 8,
            "n_embd": 96,
            "n_positions": 64,
            "initializer_range": 0.04,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    },
    "tokenizer": {"train": "bpe", "vocab_size": 1000},
    "epochs": 3,
    "batch_size": 64,
    "micro_batches": 4,
    "optim": {"learning_rate": 1.5e-3, "schedule": "linear", "warmup_fraction": 0.1, "betas": [0.9, 0.98]},
    "launch": {"processes": 2, "processes_per_gpu": 2},  # also with one GPU
    "checkpoint": {"every": 100},
}

# If any of these keys is given -> keys of the quick start to drop.
_GIVES_WAY: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("data.source", "data.sources", "data.train", "data.validation", "data.test"), ("data.source",)),
    (("model.source",), ("model", "tokenizer", "optim", "data.max_length")),  # all are for the model from scratch
    (("model.type",), ("model.config",)),
    (("tokenizer.source",), ("tokenizer",)),
    (("optim.name",), ("optim.betas", "optim.schedule")),
    (("optim.warmup_steps",), ("optim.warmup_fraction",)),
    (("batch_size",), ("micro_batches",)),
]
_POINTS = ("optim.learning_rate", "optim.warmup_fraction")  # dropped for rates that are given point by point
_ONE_PROCESS = ("launch.processes", "launch.processes_per_gpu")  # dropped for a single-process strategy


def quick_start_for(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quick start without the keys that conflict with the nested values in `chosen`."""
    keys, left_out = keys_of(chosen), set[str]()
    for any_of, too in _GIVES_WAY:
        left_out.update(too if any(keys.has(key) for key in any_of) else ())
    strategy = chosen.get("strategy")
    if isinstance(strategy, Mapping) and strategy.get("name") == ALONE:
        left_out.update(_ONE_PROCESS)
    optim = chosen.get("optim")
    if isinstance(optim, Mapping) and isinstance(optim.get("schedule"), list):
        left_out.update(_POINTS)
    values = copy.deepcopy(QUICK_START)
    for key in sorted(left_out, key=len):  # a section before its keys
        section, _, name = key.partition(".")
        if name:
            values.get(section, {}).pop(name, None)
        else:
            values.pop(section, None)
    return values
