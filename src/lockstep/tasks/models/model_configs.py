"""The config of a run's model: read from its source, or built from `model.config` as transformers does.

In: the `model` section. Out: a transformers config; or a `RunError` that names the entry and the closest valid name.
This module does not import torch at the top.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from huggingface_hub.errors import StrictDataclassError

from lockstep.config.lazy import lazy
from lockstep.config.run import Run, RunError
from lockstep.config.sections import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lockstep.data import hub
    from lockstep.tasks.models import adapters
else:  # for a pretrained model
    (hub,) = lazy("lockstep.data", "hub")
    (adapters,) = lazy("lockstep.tasks.models", "adapters")

UNPADDED = "lockstep_unpadded"  # `attn_implementation` of `unpadded.py`, which imports transformers' models
# Errors of a config's class for entries that it rejects, and how its validation introduces them.
_UNFIT = (
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    NotImplementedError,
    StrictDataclassError,
)
_VALIDATION = re.compile(r"^(Class v|V)alidation error for (field|validator) '\w+': ")
_EXCEPTION = re.compile(r"^\w+Error: ")
_OFTEN_0 = re.compile(r"drop|_id$")  # entries that are rightly 0
# Entries set by keys of the run file, or fixed in training -> what to do instead.
_ELSEWHERE = {
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
    "return_dict": "remove it: training reads outputs by name",
}


@dataclass(frozen=True)
class ModelChoice:
    """What decides a run's model: its section, how examples reach it, and the seed of weights that are drawn."""

    section: ModelSection
    padding: str  # data.padding
    max_length: int  # data.max_length
    seed: int

    @classmethod
    def of(cls, run: Run) -> ModelChoice:
        return cls(run.model, run.data.padding, run.data.max_length, run.seed)


def names(config: Any) -> list[str]:
    """All entry names that a config's class accepts: fields, derived entries, aliases and settable properties."""
    kind: Any = type(config)
    return sorted({name for name in vars(config) if not name.startswith("_")} | _names_of_class(kind))


@lru_cache(maxsize=128)
def _names_of_class(kind: Any) -> frozenset[str]:
    from transformers import PreTrainedConfig

    members = [(name, value) for name, value in inspect.getmembers_static(kind) if not name.startswith("_")]
    settable = [name for name, value in members if _is_settable(value)]
    # class constants are entries too (a family may fix one)
    fixed = [name for name in vars(PreTrainedConfig) if not name.startswith("_")]
    constants = [name for name, value in members if name not in fixed and isinstance(value, bool | int | float | str)]
    return frozenset([*kind.attribute_map, *settable, *constants])


def _is_config(value: Any) -> TypeGuard[PreTrainedConfig]:
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _is_settable(value: Any) -> bool:
    return isinstance(value, property) and value.fset is not None


def set_entries(config: Any, entries: Mapping[str, Any], at: str = "model.config") -> None:
    """Set entries of a config in place, one by one; mappings set entries of nested configs. Errors: `RunError`."""
    entry_names = set(names(config))
    for key, value in entries.items():
        present = vars(config).get(key)  # getattr may raise
        if key == "model_type":
            if value != config.model_type:
                raise RunError(
                    "LS3120",
                    f"{at}.model_type: invalid value {value!r}; this config is of the type {config.model_type!r}",
                )
            continue
        if key not in entry_names:
            raise _unknown(config, key, entry_names, at)
        if key in _ELSEWHERE and value not in (None, True, "float32"):
            raise RunError("LS3121", f"{at}.{key}: invalid value {value!r}; {_ELSEWHERE[key]}")
        if _is_config(present):
            if not isinstance(value, Mapping):
                raise RunError("LS3122", f"{at}.{key}: invalid value {value!r}; expected a mapping of entries")
            set_entries(present, value, f"{at}.{key}")
            continue
        try:
            setattr(config, key, value)
        except _UNFIT as error:
            raise RunError("LS3123", f"{at}.{key}: invalid value {value!r}; {_line(error)}") from None


def _unknown(config: Any, key: str, entry_names: set[str], at: str) -> RunError:
    near = difflib.get_close_matches(key, sorted(entry_names), 1) or [
        name for name in entry_names if _letters(name) == _letters(key)
    ]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return RunError("LS3135", f"{at}: a config of the type {config.model_type!r} has no entry {key!r}{hint}")


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def from_scratch(kind: Any, entries: Mapping[str, Any]) -> Any:
    """Build a config of this class from entries, as transformers does, so that derived values (head size, layer types,
    decoder layers) follow. Errors: `RunError`."""
    parts = _parts(kind, entries)
    set_entries(_usual(kind, parts), entries)  # checks names and types
    specs = kind.sub_configs_defaults  # defaults such as a decoder's `is_decoder`
    parts = {k: (dict(specs[k].init_kwargs) if k in specs else {}) | v for k, v in parts.items()}
    fields = {k: v for k, v in copy.deepcopy(dict(entries) | parts).items() if k != "model_type"}
    try:
        config = kind(**fields)
    except _UNFIT as error:
        raise RunError("LS3124", f"model.config: invalid entries: {rejected(error, entries)}") from None
    for name, part_entries in _parts(kind, entries).items():  # nested configs that are None by default
        if _is_config(part := getattr(config, name, None)):
            entry_names = {"model_type", *names(type(part)())}
            for key in part_entries:
                if key not in entry_names:
                    raise _unknown(part, key, entry_names, f"model.config.{name}")
    return config


def _parts(kind: Any, entries: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries given for nested configs."""
    return {k: dict(v) for k, v in entries.items() if k in kind.sub_configs and isinstance(v, Mapping)}


def _usual(kind: Any, parts: Mapping[str, Mapping[str, Any]]) -> Any:
    """The default config of this class, with the nested types that `parts` names; used to check entry names. Errors:
    `RunError`."""
    try:
        return kind(**{k: {"model_type": v["model_type"]} for k, v in parts.items() if "model_type" in v})
    except _UNFIT as error:
        raise RunError(
            "LS3125", f"model: transformers cannot build a {kind.model_type} from this config: {_line(error)}"
        ) from None


def _line(error: Exception) -> str:
    """The error in one line, without the names of exceptions."""
    line = " ".join(str(error).split())
    return _EXCEPTION.sub("", _VALIDATION.sub("", line)) or type(error).__name__


def rejected(error: Exception, entries: Mapping[str, Any]) -> str:
    """Why a model cannot be built from a config, in one line, with the entries that it divides by or looks up."""
    if isinstance(error, KeyError):
        looked_up = [f"{name}: {value!r} is unknown" for name, value in entries.items() if value in error.args]
        return ", ".join(looked_up) or f"{_line(error)} is unknown"
    numbers = {name: value for name, value in entries.items() if type(value) in (int, float)}
    low = [name for name, value in numbers.items() if value < 0 and isinstance(error, ArithmeticError | RuntimeError)]
    if isinstance(error, ZeroDivisionError):  # by a number of something
        low += [
            name for name, value in numbers.items() if type(value) is int and not value and not _OFTEN_0.search(name)
        ]
    return ": ".join([", ".join(f"{name} is {numbers[name]}" for name in low)] * bool(low) + [_line(error)])


_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def check_attention(name: str | None, device: str, precision: str, here: bool, exact: bool) -> None:
    """Check `model.attention`. `here`: whether the ranks will run on machines like this one; `exact`: whether gradients
    must have the same bits twice. Errors: `RunError`."""
    if name is None:
        return
    on_gpu = device != "cpu" and not (here and not _cuda())
    if "/" in name:  # a kernel of the Hub's
        if exact and on_gpu:
            raise _varying(name, "is a kernel from the Hub, whose gradient may differ in bits from call to call")
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kernels = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})
    if name.removeprefix("paged|") not in kernels:
        near = difflib.get_close_matches(name, kernels, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RunError("LS3126", f"model.attention: transformers has no {name!r}; {hint}it has {', '.join(kernels)}")
    if not name.startswith("flash_attention"):
        return
    instead = "; leave model.attention out for the model's own choice (sdpa)"
    if not on_gpu:
        raise RunError("LS3127", f"model.attention: {name} runs on GPUs only, and this job has none{instead}")
    if precision == "fp32":
        raise RunError("LS3128", f"model.attention: {name} does not compute in fp32; set precision=bf16{instead}")
    package = _PACKAGES.get(name)
    if here and package is not None and importlib.util.find_spec(package) is None:
        raise RunError("LS3129", f"model.attention: {name} needs {package}, which is not installed{instead}")
    if exact and name.removeprefix("paged|") != "flash_attention_2":
        why = "has gradients that differ from call to call in published builds, even with its deterministic option"
        raise _varying(name, f"{why} (Dao-AILab/flash-attention#2244)")


def _varying(name: str, why: str) -> RunError:
    return RunError(
        "LS3195",
        f"model.attention: {name} {why}; leave model.attention out for the model's own choice (sdpa), use "
        "flash_attention_2, or give up equal bits with strategy.exact=false",
    )


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


FROM_END_TOKEN = ("bart", "mbart", "fsmt")  # families whose decoder starts from the end token of texts
FROM_FIRST_TOKEN = ("t5gemma", "t5gemma2")  # families whose decoder starts from the first token of texts
# Families whose decoder needs a mask: those whose start token has the id of padding, and ProphetNet, which takes its
# relative positions (transformers 5.23) from other texts of the batch.
NEEDS_DECODER_MASK = (*FROM_FIRST_TOKEN, "prophetnet")


def load_config(section: ModelSection) -> Any:
    """Load the model's config and set the run's entries. Errors: `RunError`."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if section.type is not None:
        if section.type not in CONFIG_MAPPING:
            near = difflib.get_close_matches(section.type, list(CONFIG_MAPPING), 3)
            raise RunError(
                "LS3130",
                f"model.type: unknown type {section.type!r}; similar types of transformers are "
                f"{', '.join(near) or 'none'}",
            )
        return from_scratch(CONFIG_MAPPING[section.type], section.config)
    source = local_or_id(section)
    if not Path(source).is_dir():
        hub.be_brief()
    try:
        config = AutoConfig.from_pretrained(
            source, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
    except Exception as error:  # not a model folder, no such Hub id, no network: user errors
        reason = hub.explained(error, section.revision)
        raise RunError("LS3131", f"model.source: cannot load a model from {source!r}: {reason}") from error
    set_entries(config, section.config)
    return config


def with_architectures(config: Any) -> Any:
    """Make `architectures` a list: transformers iterates over it for families with several classes."""
    config.architectures = config.architectures or []
    return config


def causal_entries(section: ModelSection) -> dict[str, Any]:
    """Config entries of a causal language model: no cache in training, and `is_decoder` for encoder families. Errors:
    `RunError`."""
    return {"use_cache": False} | ({"is_decoder": True} if needs_decoder(section) else {})


def needs_decoder(section: ModelSection) -> bool:
    """Whether this family attends to later tokens unless its config sets `is_decoder`. Errors: `RunError`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = load_config(section)
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)


def texts(config: Any) -> list[Any]:
    """A config and its nested text configs: encoder, decoder, and the text part of a multimodal model."""
    parts = [entry(config, name) for name in ("encoder", "decoder", "text_config")]
    return [config] + [t for part in parts if _is_config(part) for t in texts(part)]


def entry(config: Any, name: str, otherwise: Any = None) -> Any:
    """Return an entry of a config, or `otherwise`.

    XLNet's config raises for its position limit because it has none. If some layers have other values (Gemma 4), the
    entry is the value of the remaining layers."""
    try:
        return getattr(config, name, otherwise)
    except NotImplementedError:
        return otherwise
    except RuntimeError:
        return vars(config).get(name, otherwise)


LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # config entries: probability of skipping a layer


def leaves_out_layers(config: Any) -> str | None:
    """The config entry that enables LayerDrop (layers skipped at random per micro-batch); None if disabled."""
    return next((entry for entry in LAYERDROP if (getattr(config, entry, None) or 0) > 0), None)


def local_or_id(section: ModelSection) -> str:
    """The model's folder, validated, or its Hub id. Errors: `RunError`."""
    source = hub.model_folder(str(section.source))
    path = Path(source).expanduser()
    if adapters.is_adapter(path):
        raise RunError(
            "LS3132",
            f"model.source: {path} holds an adapter (adapter_config.json); name the model that it belongs to, or train "
            "it again with model.adapter.export: merged",
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RunError(
                "LS3133",
                f"model.source: the folder {path} is not a model folder, because it has no config.json; name a "
                "folder that save_pretrained wrote",
            )
        if section.revision is not None:
            raise RunError(
                "LS3136", f"model.revision: applies only to models of the Hub, and {path} is a folder; remove it"
            )
        check_one_save(path, "model.source")
        return str(path)
    return source


def check_one_save(path: Path, key: str) -> None:
    """Refuse a folder that holds a model twice: `save_pretrained` of several files leaves an older single one, which
    `from_pretrained` then reads. An index whose files are gone does no harm. Errors: `RunError`."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{single}.index.json"
        if not (path / single).is_file():
            continue
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or none that can be read
            return
        if single not in named and named and all((path / name).is_file() for name in named):
            raise RunError(
                "LS3480",
                f"{key}: {path} holds a model twice, as {single} and as the {len(named)} files of {index.name}; "
                f"from_pretrained reads {single}, even if the others are newer. Remove one of the two",
            )
        return
