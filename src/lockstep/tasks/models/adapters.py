"""LoRA and other adapters through `peft`: few new weights are trained, the model's own weights are frozen.

In: `model.adapter` of the run file and a model. Out: the model with its adapter; an export of the adapter alone, or of
the model with the adapter merged into its weights. Needs the extra `lockstep-train[peft]`.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.tasks.models import heads

if TYPE_CHECKING:
    from torch import Tensor, nn

OURS = {"type", "export"}  # keys of `model.adapter` that are not peft's
EXPORTS = ("merged", "adapter")
_CLASSIFIER = ("classifier", "score")
HEADS = {"SEQ_CLS": _CLASSIFIER, "TOKEN_CLS": _CLASSIFIER, "QUESTION_ANS": ("qa_outputs",)}  # trained whole by peft
WEIGHTS = "adapter_model.safetensors"
TIED = ("embed_tokens", "lm_head")  # names by which peft knows an embedding when it loads an adapter


def check(section: ModelSection) -> None:
    """Refuse an invalid adapter configuration. Errors: `RunError`."""
    adapter = section.adapter
    if not adapter:
        return
    if importlib.util.find_spec("peft") is None:
        raise RunError("LS3070", "model.adapter: peft is not installed: pip install 'lockstep-train[peft]'")
    if section.source is None:
        raise RunError("LS3071", "model.adapter: an adapter needs a pretrained model; set model.source")
    if (export := adapter.get("export", "merged")) not in EXPORTS:
        raise RunError(
            "LS3072", f"model.adapter.export: invalid value {export!r}; expected one of {', '.join(EXPORTS)}"
        )
    if adapter.get("trainable_token_indices") and section.dtype != "float32":
        raise RunError(
            "LS3410",
            "model.adapter.trainable_token_indices: peft computes these tokens in the dtype of the frozen embedding, "
            "which is kept in bfloat16; set model.dtype=float32",
        )
    config(section, "classification")


def config(section: ModelSection, head: str) -> Any:
    """Build peft's config from the run's adapter. Errors: `RunError`."""
    import dataclasses

    from peft import PEFT_TYPE_TO_CONFIG_MAPPING as KINDS
    from peft import PeftType

    name = str(section.adapter.get("type", "lora")).upper()
    kinds = sorted(kind.value.lower() for kind in KINDS)
    if name.lower() not in kinds:
        near = difflib.get_close_matches(name.lower(), kinds, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RunError("LS3073", f"model.adapter.type: peft has no {name.lower()!r}; {hint}it has {', '.join(kinds)}")
    kind = KINDS[PeftType(name)]
    entries = {key: value for key, value in section.adapter.items() if key not in OURS}
    fields = {field.name for field in dataclasses.fields(kind)}
    for key in entries:
        if key not in fields or key in ("task_type", "peft_type", "inference_mode"):
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(fields))}"
            raise RunError("LS3074", f"model.adapter: {name.lower()} has no option {key!r}; {hint}")
    task_type = heads.of(head).adapter
    if task_type is None and "modules_to_save" in fields:
        entries.setdefault("modules_to_save", ["classifier"])  # peft detects the heads of the other classifiers
    if str(entries.get("target_modules")).lower() == "all-linear" and "exclude_modules" in fields:
        # peft leaves out heads of sequence classifiers of one layer; other heads it adapts and trains whole, or fails
        trained = [*(entries.get("modules_to_save") or []), *HEADS.get(str(task_type), ())]
        if trained:
            entries.setdefault("exclude_modules", rf".*({'|'.join(map(re.escape, trained))})(\..*)?")
    try:
        return kind(task_type=task_type, **entries)
    except (TypeError, ValueError) as error:
        raise RunError("LS3075", f"model.adapter: {' '.join(str(error).split())}") from error


@contextmanager
def peft_without_warnings() -> Iterator[None]:
    """Suppress two warnings of peft: about an attribute that transformers has renamed, and about an adapter on tied
    weights, which `storage_dtype.merged` unties before it merges."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        yield


def wrap(section: ModelSection, model: nn.Module, head: str) -> nn.Module:
    """Add the adapter to the model. Its weights are drawn from the seed after the model's own."""
    from peft import get_peft_model

    try:
        with peft_without_warnings():
            wrapped: Any = get_peft_model(model, _without_bypassed(config(section, head), model))
    except (TypeError, ValueError) as error:  # no such modules, or an unsupported adapter type
        raise RunError("LS3076", f"model.adapter: {' '.join(str(error).split())[:400]}") from error
    refuse_bypassed(wrapped, "model.adapter")
    about = wrapped.active_peft_config
    tied = sorted(getattr(about, "target_modules_to_tie", None) or ())
    if tied and section.adapter.get("export") == "adapter" and not _known_embedding(about.target_modules):
        raise RunError(
            "LS3413",
            f"model.adapter.ensure_weight_tying: peft would load this adapter without {tied[0]}, because it knows an "
            f"embedding by the names {' and '.join(TIED)} alone; set model.adapter.export=merged, or "
            "ensure_weight_tying=false",
        )
    return wrapped


def _without_bypassed(chosen: Any, model: nn.Module) -> Any:
    """Leave layers that torch's own attention never calls, such as that of SigLIP's pooling, out of all-linear."""
    import torch

    if str(getattr(chosen, "target_modules", None)).lower() != "all-linear" or not hasattr(chosen, "exclude_modules"):
        return chosen
    attentions = [name for name, module in model.named_modules() if isinstance(module, torch.nn.MultiheadAttention)]
    bypassed = [f"{name}.out_proj" for name in attentions]
    others = chosen.exclude_modules or []
    if isinstance(others, str) and bypassed:
        chosen.exclude_modules = f"(?:{others})|{'|'.join(map(re.escape, bypassed))}"
    elif bypassed:
        chosen.exclude_modules = {*others, *bypassed}
    return chosen


def refuse_bypassed(model: nn.Module, key: str) -> None:
    """Refuse an adapter on a layer that torch's own attention never calls. Errors: `RunError`."""
    import torch

    for name, module in model.named_modules():
        if name.endswith("base_layer"):  # of peft's adapter for the whole attention, which reads both
            continue
        if isinstance(module, torch.nn.MultiheadAttention) and hasattr(module.out_proj, "base_layer"):
            raise RunError(
                "LS3414",
                f"{key}: the adapter on {name}.out_proj would never be computed or trained, because torch's "
                "MultiheadAttention reads the weight of that layer without calling it; leave the layer out, by "
                "target_modules or exclude_modules",
            )


def _known_embedding(targets: Any) -> bool:
    return any(name.rpartition(".")[2] in TIED for name in targets or ())


def save(section: ModelSection, model: Any, folder: Path, published: str | None) -> None:
    """Write the adapter alone, or the merged model: in bfloat16 if it was both published and stored in bfloat16, else
    in float32.

    `published`: the dtype in the model's own config."""
    from lockstep.tasks.models import storage_dtype

    if section.adapter.get("export", "merged") == "merged":
        merged: Any = storage_dtype.merged(model, low=section.dtype == "bfloat16" == published)
        merged.save_pretrained(folder)
    else:
        model.save_pretrained(folder)
        model.config.save_pretrained(folder)  # names of labels


def is_adapter(export: Path) -> bool:
    """Whether an export is an adapter without its base model."""
    return (export / "adapter_config.json").is_file()


def load(model: nn.Module, export: Path) -> None:
    """Load an adapter's weights into a model returned by `wrap`. Errors: `RunError` if their names differ."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    weights: Mapping[str, Tensor] = load_file(export / WEIGHTS)
    _check_names(model, export)
    set_peft_model_state_dict(model, weights)


def load_onto(base: nn.Module, export: Path, trainable: bool = False) -> Any:
    """Load an adapter, as its folder describes it, onto its base model. Errors: `RunError` if names differ; peft only
    warns of weights that the folder lacks, and leaves them as they are drawn."""
    from peft import PeftModel

    with peft_without_warnings():
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)  # refused below
        model = PeftModel.from_pretrained(base, export, is_trainable=trainable)
    _check_names(model, export)
    return model


def _check_names(model: Any, export: Path) -> None:
    """Check that an adapter's file holds exactly the weights of the model's adapter. Errors: `RunError`."""
    from peft import get_peft_model_state_dict
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
    from safetensors import safe_open

    with safe_open(export / WEIGHTS, "pt") as file:
        stored = {*file.keys()}
    part = PEFT_TYPE_TO_PREFIX_MAPPING.get(model.active_peft_config.peft_type, "")
    built = {*get_peft_model_state_dict(model, save_embedding_layers=False)}
    for names, what in (
        (built - stored, "lacks"),
        (stored - built, "belongs to another model, which has weights that this one lacks:"),
    ):
        if wrong := sorted(name for name in names if part in name):
            more = f" and {len(wrong) - 1:,} more" * (len(wrong) > 1)
            raise RunError(
                "LS3493",
                f"{export}: the adapter {what} {wrong[0]}{more}; restore its files, or name the model that it was "
                "trained on in model.source",
            )
