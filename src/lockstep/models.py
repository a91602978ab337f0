"""Models from transformers: pretrained, or from a config; and back to a folder. The tasks share this.

In: the `model` section, a tokenizer and label names. Out: a float32 model on the CPU, the same bits in every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.run import Run, RunError
from lockstep.world import seed_libraries

# Families whose positions start after the padding id, so that fewer tokens fit than positions exist.
_OFFSET_POSITIONS = {
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "roberta-prelayernorm",
    "longformer",
    "mpnet",
}


def check(run: Run) -> None:
    """Refuse, before any process starts, a model that cannot be built. Errors: `RunError`."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN,
    )

    config = load_config(run)
    if config.model_type not in KNOWN and not run.model.trust_remote_code:
        raise RunError(f"model: transformers has no sequence classifier of the type {config.model_type!r}")
    if run.model.config:
        _check_buildable(config)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None:
        fits = positions - (config.pad_token_id + 1 if config.model_type in _OFFSET_POSITIONS else 0)
        if run.data.max_length > fits:
            raise RunError(
                f"data.max_length: {run.data.max_length} tokens, but the model has positions for {fits}; lower it"
            )


def _check_buildable(config: Any) -> None:
    """Build the classifier without memory, so that sizes that do not fit each other are told now."""
    from transformers import AutoModelForSequenceClassification

    try:
        with torch.device("meta"):
            AutoModelForSequenceClassification.from_config(config)
    except (ValueError, RuntimeError, AssertionError, TypeError, KeyError, ZeroDivisionError) as error:
        said = " ".join(str(error).split())
        if "meta" in said:  # a model that cannot be built without memory says nothing of its sizes
            return
        raise RunError(f"model.config: transformers cannot build this {config.model_type}: {said}") from error


def load_config(run: Run) -> Any:
    """The model's config with the run's entries set. Errors: `RunError`."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if run.model.type is not None:
        if run.model.type not in CONFIG_MAPPING:
            import difflib

            near = difflib.get_close_matches(run.model.type, list(CONFIG_MAPPING), 3)
            raise RunError(
                f"model.type: transformers knows no type {run.model.type!r}; near are {', '.join(near) or 'none'}"
            )
        config = CONFIG_MAPPING[run.model.type]()
    else:
        source = local_or_id(run)
        try:
            config = AutoConfig.from_pretrained(
                source, revision=run.model.revision, trust_remote_code=run.model.trust_remote_code
            )
        except Exception as error:  # not a model folder, no such Hub id, no network: all are the user's to mend
            raise RunError(
                f"model.source: cannot load a model from {source!r}: {' '.join(str(error).split())[:400]}"
            ) from error
    for key, value in run.model.config.items():
        if not hasattr(config, key):
            raise RunError(f"model.config: a config of the type {config.model_type!r} has no entry {key!r}")
        try:
            setattr(config, key, value)
        except (TypeError, ValueError) as error:
            raise RunError(f"model.config.{key}: {value!r} will not do: {' '.join(str(error).split())}") from None
    return config


def local_or_id(run: Run) -> str:
    """The folder, checked to be a model's, or the Hub id. Errors: `RunError`."""
    source = str(run.model.source)
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RunError(f"model.source: the folder {path} is not a model's: it has no config.json")
        return str(path)
    if source.startswith((".", "/", "~")):
        raise RunError(f"model.source: there is no folder {path}")
    return source


def sequence_classifier(run: Run, tokenizer: Any, labels: list[str], empty: bool = False) -> nn.Module:
    """A classifier; weights that the source does not have (the head) are drawn from the seed. `empty`: on the meta
    device."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = load_config(run)
    config.num_labels = len(labels)
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: code for code, name in enumerate(labels)}
    config.pad_token_id = tokenizer.pad_token_id
    options: dict[str, Any] = {"attn_implementation": run.model.attention} if run.model.attention else {}
    seed_libraries(run.seed)
    if run.model.type is not None:
        config.vocab_size = len(tokenizer)
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if run.model.type is not None or empty:
        with torch.device("meta" if empty else "cpu"):
            options |= {"trust_remote_code": run.model.trust_remote_code}
            model = AutoModelForSequenceClassification.from_config(config, **options)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(
            local_or_id(run),
            config=config,
            revision=run.model.revision,
            trust_remote_code=run.model.trust_remote_code,
            ignore_mismatched_sizes=True,  # a head for other labels is drawn anew
            **options,
        )
    model = model.float()
    assert all(p.dtype == torch.float32 for p in model.parameters()), "weights must be float32"
    return model


def save(model: nn.Module, weights: Mapping[str, Tensor], tokenizer: Any, folder: Path) -> None:
    """Write config, weights and tokenizer so that transformers' `from_pretrained` loads them."""
    plain = {name: tensor.cpu() for name, tensor in weights.items()}
    model.load_state_dict(plain)
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: what transformers does not split over devices, else the longest list of modules."""
    kept = set(getattr(model, "_no_split_modules", None) or ())
    found = [m for m in model.modules() if type(m).__name__ in kept]
    if not found:
        lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
        found = max(lists, key=len, default=[])
    return found


def tensor_plan(run: Run, ranks: int, prefix: str = "") -> dict[str, Any]:
    """The plan that transformers gives for the model's family, in torch's terms; `prefix` is where the base model lies.

    Errors: `RunError` when there is none, or when attention heads cannot be shared by so many ranks.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    config = load_config(run)
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan or set(plan.values()) - set(styles):
        raise RunError(
            f"strategy.options.tensor_parallel: transformers has no plan for {config.model_type} that can be used here "
            "(llama, qwen2, mistral and their like have one); leave the option out"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (getattr(config, name, None) or ranks) % ranks:
            raise RunError(
                f"strategy.options.tensor_parallel: {ranks} ranks cannot share the model's {getattr(config, name)} "
                f"{name}"
            )
    return {f"{prefix}{pattern}": styles[style]() for pattern, style in plan.items()}
