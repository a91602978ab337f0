"""Settings that a script takes implicitly from the model and tokenizer that it loads: mode, dtype and padding side.

In: a draft that names a model. Out: keys, notes and gaps: dropout that is off because the model stays in evaluation
mode, weights that are saved in another type than float32, a tokenizer that pads on the left.
"""

from __future__ import annotations

from typing import Any

from lockstep.config.run import Run, RunError
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import FILL_IN, RunDraft

EVALUATED = "from_pretrained gives a model in evaluation mode, so it trains without dropout"
_RANDOM = ("drop", "jitter")  # parts of the names of entries of a config that draw random numbers in training mode


def without_dropout(draft: RunDraft, where: str, why: str = EVALUATED) -> bool:
    """Set all dropout rates in `model.config` to 0, which reproduces training in evaluation mode. Records a gap if that
    mode changes more than dropout, or if the config cannot be read. Returns whether it succeeded."""
    if draft.is_given("model.config"):
        return True
    name, entries = f"{where} ({why})", draft.keys.get("model.config", {})
    config = model_config(draft, entries)
    if config is None:
        unread = "the dropout rates in model.config must be 0, but the model's config cannot be read here"
        draft.lacks(name, unread, "model.config")
        return False
    entries = _merged(entries, _rates(config))
    if (module := _differs_in_training(model_config(draft, entries))) is not None:
        draft.lacks(name, f"{module} behaves differently in training mode, which lockstep uses")
        return False
    if entries != draft.keys.get("model.config", {}):
        draft.set("model.config", entries, f"{where}: dropout is off")
        draft.read.append(f"{name} -> model.config")
        draft.notes.append(f"{name}: model.config sets its rates of dropout to 0")
    return True


def model_config(draft: RunDraft, entries: dict[str, Any]) -> Any:
    """Return the config of the draft's model with these entries, or None if it cannot be read."""
    source = draft.keys.get("model.source")
    if not isinstance(source, str) or source == FILL_IN:
        return None
    names = ("source", "revision", "trust_remote_code")
    section = {name: draft.keys[f"model.{name}"] for name in names if f"model.{name}" in draft.keys}
    from lockstep.tasks.models import model_configs

    try:
        return model_configs.load_config(Run.model_validate({"model": {**section, "config": entries}}).model)
    except (RunError, ValueError):  # planning says why
        return None


def _rates(config: Any) -> dict[str, Any]:
    """Return the entries of a config that are nonzero dropout rates, each mapped to 0.0, nested as in the config."""
    from transformers import PreTrainedConfig

    rates: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            if inner := _rates(value):
                rates[name] = inner
        elif any(part in name for part in _RANDOM) and type(value) in (int, float) and value > 0:
            rates[name] = 0.0
    return rates


def _merged(entries: dict[str, Any], rates: dict[str, Any]) -> dict[str, Any]:
    return {
        **entries,
        **{k: _merged(entries.get(k, {}), v) if isinstance(v, dict) else v for k, v in rates.items()},
    }


def _differs_in_training(config: Any) -> str | None:
    """Return the class of a module that computes something else in training mode, in a model of this config built
    without memory. None if there is no such module, or if the model cannot be built (planning reports that)."""
    import torch
    from torch import nn
    from transformers import AutoModel

    of_batches = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

    try:
        with torch.device("meta"):
            modules = list(AutoModel.from_config(config).modules())
    except Exception:
        return None
    for module in modules:
        if isinstance(module, of_batches) or (isinstance(module, dropouts) and module.p > 0):
            return type(module).__name__
    return None


def empty_model(draft: RunDraft, script: Script) -> Any:
    """Build the script's model on the meta device. None if its class or config cannot be read."""
    import torch
    import transformers

    loads = (c.origin.split(".") for c in script.calls if c.name == "from_pretrained")
    name = next((parts[-2] for parts in loads if parts[0] == "transformers" and "For" in parts[-2]), "")
    if not name and draft.task == "language_modeling":  # TRL's trainers take a name
        name = "AutoModelForCausalLM"
    kind, config = getattr(transformers, name, None), model_config(draft, draft.keys.get("model.config", {}))
    if kind is None or config is None:
        return None
    try:
        with torch.device("meta"):
            return kind.from_config(config) if name.startswith("Auto") else kind(config)
    except Exception:  # planning says why
        return None


def weights(draft: RunDraft, script: Script) -> tuple[dict[str, int], set[str]] | None:
    """Return (weight name -> number of dimensions, names of weights that lockstep never decays) for the script's model.
    None if the model cannot be read, or if an adapter is trained."""
    from lockstep.strategies.exact.stepper import without_decay

    model = None if "model.adapter" in draft.keys else empty_model(draft, script)
    if model is None:
        return None
    return {name: weight.dim() for name, weight in model.named_parameters()}, without_decay(model)


def note_saved_dtype(draft: RunDraft, where: str) -> None:
    """Note that a model loaded without `dtype` is saved in fewer bits than float32. Keep the base of an adapter in
    float32 if it is saved so; the default of `model.dtype` would round it to bfloat16."""
    if draft.keys.keys() & {"model.dtype", "model.quantization"}:
        return
    name = str(getattr(model_config(draft, {}), "dtype", None)).removeprefix("torch.")
    if "model.adapter" in draft.keys:
        if name == "float32":
            draft.set("model.dtype", name, "(the dtype that the model is saved in)")
        return
    if name in ("bfloat16", "float16"):
        draft.notes.append(
            f"{where} names no dtype: transformers 5 keeps the weights in {name}, as they are saved, and transformers "
            "4 in float32; here they are float32 (model.dtype)"
        )


def pads_left(draft: RunDraft) -> bool:
    """Return whether the draft's tokenizer is saved with left padding and its model has absolute positions, which left
    padding shifts. Relative positions (such as rotary ones) do not depend on the side."""
    source = draft.keys.get("tokenizer.source") or draft.keys.get("model.source")
    config = model_config(draft, {})
    if not isinstance(source, str) or config is None:
        return False
    table = getattr(config, "max_position_embeddings", None)
    if table is None or getattr(config, "rope_parameters", None):
        return False
    from transformers import AutoTokenizer

    try:
        return bool(AutoTokenizer.from_pretrained(source).padding_side == "left")
    except Exception:  # planning says why
        return False
