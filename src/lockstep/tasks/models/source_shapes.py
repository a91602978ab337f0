"""Weights of a pretrained model whose shapes are not those that its config gives them.

In: a run, and a model of its config. Out: None, or a `RunError`. `from_pretrained` runs with `ignore_mismatched_sizes`,
so that a head for other labels is reinitialized. Any other mismatched weight would silently lose its training; an entry
of `model.config` such as `vocab_size`, or an edited config.json, is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from lockstep.config.run import Run, RunError
from lockstep.tasks.models import heads, source_ties
from lockstep.tasks.models.model_configs import with_architectures

_OWN_HEADS = (heads.CLASSIFICATION, heads.IMAGE_CLASSIFICATION, heads.TOKEN_CLASSIFICATION, heads.QUESTION_ANSWERING)

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # name -> shape in the files, shape by the config


def check(run: Run, config: Any, head: str) -> None:
    """Refuse, before any process starts, a config that does not match those of the model's files that are on this
    machine. Errors: `RunError`."""
    if run.model.source is None or run.model.trust_remote_code or run.model.quantization:
        return
    if getattr(config, "quantization_config", None) is not None:
        return
    import transformers

    model: Any = None
    with suppress(Exception), torch.device("meta"):  # inconsistent sizes are refused elsewhere
        model = getattr(transformers, heads.of(head).auto).from_config(with_architectures(config))
    if model is None:
        return
    there = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    differing = {n: (shape, there[n]) for n, shape in source_ties.shapes_here(run, model).items() if shape != there[n]}
    refuse(run, model, head, differing)


def refuse(run: Run, model: Any, head: str, differing: Shapes) -> None:
    """Errors: `RunError` if weights other than a label head have mismatched shapes."""
    base = f"{model.base_model_prefix}."
    wrong = {name: of for name, of in sorted(differing.items()) if head not in _OWN_HEADS or name.startswith(base)}
    if not wrong:
        return
    name, (stored, built) = next(iter(wrong.items()))
    more = f" (and {len(wrong) - 1:,} more)" if len(wrong) > 1 else ""
    what = "its config.json asks for another shape; correct it"
    if run.model.config:
        what = f"model.config ({', '.join(run.model.config)}) asks for another shape; leave such entries out"
    add = ""
    if not run.model.config or "vocab_size" in run.model.config:
        add = "; to add rows for tokens, save the model after resize_token_embeddings of transformers"
    raise RunError(
        "LS3442",
        f"model.source: {run.model.source} holds {name}{more} with the shape {list(stored)}, and {what}. The weight "
        f"would be drawn anew with the shape {list(built)}, and what it had learned be lost{add}",
    )
