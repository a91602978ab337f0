"""Pool a model's hidden states to one unit vector per text, and write the files that sentence-transformers reads.

In: a transformers model without a head. Out: the same model, with vectors [B, H] as the output's `logits`, computed by
a forward hook.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.data.hub import optional_file

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER = "1_Pooling"  # of a model of sentence-transformers
# Pooling -> entry of the config in that folder.
MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last_token": "pooling_mode_lasttoken"}
_MODULES = {"": "Transformer", FOLDER: "Pooling", "2_Normalize": "Normalize"}


def pooled(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Pool hidden states [B, T, H] of right-padded texts (mask [B, T]) to unit vectors: float32 [B, H]."""
    import torch
    from torch.nn.functional import normalize

    hidden = hidden.float()
    if pooling == "cls":
        vectors = hidden[:, 0]
    elif pooling == "last_token":
        vectors = hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
    else:
        weights = mask.unsqueeze(-1).to(hidden.dtype)  # [B, T, 1]
        vectors = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
    return normalize(vectors, dim=-1)


def install(model: nn.Module, pooling: str) -> nn.Module:
    """Make the model return its vectors. Its own pooler (BERT) is frozen and unused."""
    for name, parameter in model.named_parameters():
        if name.startswith("pooler."):
            parameter.requires_grad_(False)
    model.register_forward_hook(partial(_vectors, pooling), with_kwargs=True)
    return model


def _vectors(pooling: str, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(logits=pooled(output.last_hidden_state, kwargs["attention_mask"], pooling))


# -- sentence-transformers -------------------------------------------------------------------------------------------


def of_source(section: ModelSection) -> str | None:
    """The pooling of a sentence-transformers model; None if its files do not specify one. Errors: `RunError` if it is
    unsupported."""
    from lockstep.tasks.models import model_configs

    if section.source is None:
        return None
    file = optional_file(model_configs.local_or_id(section), f"{FOLDER}/config.json", section.revision)
    return None if file is None else _mode(file, section.source)


def of_folder(folder: Path) -> str:
    """The pooling of an export."""
    return _mode(folder / FOLDER / "config.json", str(folder))


def _mode(path: Path, source: str) -> str:
    config = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(config.get("pooling_mode"), str):
        entries = [config["pooling_mode"]]
    else:
        entries = [entry for entry, value in config.items() if entry.startswith("pooling_mode_") and value is True]
    names = {entry: name for name, entry in MODES.items()} | {"lasttoken": "last_token", "mean": "mean", "cls": "cls"}
    if len(entries) != 1 or entries[0] not in names:
        raise RunError(
            "LS3160",
            f"task.pooling: {source} pools by {' and '.join(entries) or 'nothing'} ({FOLDER}/config.json), "
            f"which is not supported; choose one of {', '.join(MODES)}",
        )
    return names[entries[0]]


def write(folder: Path, pooling: str, width: int, tokens: int) -> None:
    """Add the sentence-transformers files to an export: pooling, normalization and maximum length."""
    kinds = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(_MODULES.items())
    ]
    modes = {entry: name == pooling for name, entry in MODES.items()}
    files: dict[str, Any] = {
        "modules.json": kinds,
        f"{FOLDER}/config.json": {"word_embedding_dimension": width, **modes, "include_prompt": True},
        "sentence_bert_config.json": {"max_seq_length": tokens, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {}, "similarity_fn_name": "cosine"},
    }
    for name, values in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
