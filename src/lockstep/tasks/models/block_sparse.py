"""BigBird's attention, which transformers changes from `block_sparse` to `original_full` when it meets a short text.

It does so within a forward, for good, and draws weights of new layers that are not used: dropout then depends on what a
process has read before. In: a config or a model. Out: the model as that first forward would leave it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.config.run import RunError

_FAMILIES = ("big_bird", "bigbird_pegasus")


def check(config: Any, tokens: int, key: str) -> None:
    """Refuse a model that some texts of up to `tokens` would change and others not. `key` sets `tokens`. Errors:
    `RunError`."""
    if config.model_type not in _FAMILIES or config.attention_type != "block_sparse":
        return
    shortest = (5 + 2 * config.num_random_blocks) * config.block_size
    if tokens > shortest:
        raise RunError(
            "LS3080",
            f"model.config.attention_type: a {config.model_type} changes from block_sparse to original_full, "
            f"for good, at the first batch of texts of at most {shortest} tokens, so a process's results "
            f"would depend on the batches before; set model.config.attention_type to original_full, or {key} "
            f"to {shortest} or less",
        )


def settle(model: nn.Module) -> None:
    """Change the attention now, in place, as `check` has allowed texts that change it only."""
    if getattr(getattr(model, "config", None), "model_type", None) not in _FAMILIES:
        return
    with torch.random.fork_rng(devices=[]):
        for module in model.modules():
            if callable(switch := getattr(module, "set_attention_type", None)):
                switch("original_full")  # which does nothing the second time
