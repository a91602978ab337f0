"""The config of a run's model: read from where the model is, or made of `model.config`, as transformers makes it.

In: the `model` section. Out: a config of transformers; or a `RunError` that names the entry, and the nearest name that
the config's class knows. Nothing here imports torch at the top.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from huggingface_hub.errors import StrictDataclassError

from lockstep.config.run import Run, RunError
from lockstep.data.hub import explained, model_folder
from lockstep.tasks.models import adapters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

UNPADDED = "lockstep_unpadded"  # `attn_implementation` of `unpadded.py`, which imports transformers' models
_UNFIT = (AttributeError, TypeError, ValueError, KeyError, NotImplementedError, StrictDataclassError)  # of configs
# Entries that keys of the run file stand for, or whose other values training cannot have -> what to do.
_ELSEWHERE = {
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
    "return_dict": "leave it out: training reads outputs by their names",
}


def names(config: Any) -> list[str]:
    """The entries that a config's class knows: its fields, what it derives from them, other names of these, and
    properties that can be set."""
    kind: Any = type(config)
    return sorted({name for name in vars(config) if not name.startswith("_")} | _names_of_class(kind))


@lru_cache(maxsize=128)
def _names_of_class(kind: Any) -> frozenset[str]:
    from transformers import PreTrainedConfig

    members = [(name, value) for name, value in inspect.getmembers_static(kind) if not name.startswith("_")]
    settable = [name for name, value in members if _is_settable(value)]
    # a constant of the class is an entry where the instance has none of its own (a family that fixes one)
    fixed = [name for name in vars(PreTrainedConfig) if not name.startswith("_")]
    constants = [name for name, value in members if name not in fixed and isinstance(value, bool | int | float | str)]
    return frozenset([*kind.attribute_map, *settable, *constants])


def _is_config(value: Any) -> TypeGuard[PreTrainedConfig]:
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _is_settable(value: Any) -> bool:
    return isinstance(value, property) and value.fset is not None


def set_entries(config: Any, entries: Mapping[str, Any], at: str = "model.config") -> None:
    """Set entries of a config one by one, in place, and those of a config within it for which a mapping is given.
    Errors: `RunError`."""
    entry_names = set(names(config))
    for key, value in entries.items():
        present = vars(config).get(key)  # reading an entry by its name may raise an error
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
    """A config of this class, made of the entries as transformers makes it: what a family derives from them (the size
    of a head, the kinds of layers, a decoder's layers) follows. Errors: `RunError`."""
    parts = _parts(kind, entries)
    set_entries(_usual(kind, parts), entries)  # names, and types, by the key
    specs = kind.sub_configs_defaults  # a decoder is one, unless something else is said
    parts = {k: (dict(specs[k].init_kwargs) if k in specs else {}) | v for k, v in parts.items()}
    fields = {k: v for k, v in copy.deepcopy(dict(entries) | parts).items() if k != "model_type"}
    try:
        config = kind(**fields)
    except _UNFIT as error:
        raise RunError("LS3124", f"model.config: invalid entries: {_line(error)}") from None
    for name, part_entries in _parts(kind, entries).items():  # a config within it that is none unless entries make it
        if _is_config(part := getattr(config, name, None)):
            entry_names = {"model_type", *names(type(part)())}
            for key in part_entries:
                if key not in entry_names:
                    raise _unknown(part, key, entry_names, f"model.config.{name}")
    return config


def _parts(kind: Any, entries: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The mappings that are given for configs within the config."""
    return {k: dict(v) for k, v in entries.items() if k in kind.sub_configs and isinstance(v, Mapping)}


def _usual(kind: Any, parts: Mapping[str, Mapping[str, Any]]) -> Any:
    """The config of this class with the types within it that are named: what has which entries. Errors: `RunError`."""
    try:
        return kind(**{k: {"model_type": v["model_type"]} for k, v in parts.items() if "model_type" in v})
    except _UNFIT as error:
        raise RunError(
            "LS3125", f"model: transformers cannot build a {kind.model_type} from this config: {_line(error)}"
        ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def check(run: Run, here: bool) -> None:
    """`here`: the ranks will run on machines like this one. Errors: `RunError`."""
    name = run.model.attention
    if name is None or "/" in name:  # a kernel of the Hub's
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
    if run.launch.device == "cpu" or (here and not _cuda()):
        raise RunError("LS3127", f"model.attention: {name} runs on GPUs only, and this job has none{instead}")
    if run.precision == "fp32":
        raise RunError("LS3128", f"model.attention: {name} does not compute in fp32; set precision=bf16{instead}")
    package = _PACKAGES.get(name)
    if here and package is not None and importlib.util.find_spec(package) is None:
        raise RunError("LS3129", f"model.attention: {name} needs {package}, which is not installed{instead}")


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


FROM_END_TOKEN = ("bart", "mbart", "fsmt")  # families whose decoder starts from the end token of texts
FROM_FIRST_TOKEN = ("t5gemma", "t5gemma2")  # families whose decoder starts from the first token of texts
# Families whose decoder needs to know what is padding: one that would take its start for padding that has its number,
# and ProphetNet, whose relative positions (transformers 5.23) are those of other texts of the batch.
NEEDS_DECODER_MASK = (*FROM_FIRST_TOKEN, "prophetnet")


def load_config(run: Run) -> Any:
    """The model's config with the run's entries set. Errors: `RunError`."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if run.model.type is not None:
        if run.model.type not in CONFIG_MAPPING:
            near = difflib.get_close_matches(run.model.type, list(CONFIG_MAPPING), 3)
            raise RunError(
                "LS3130",
                f"model.type: unknown type {run.model.type!r}; similar types of transformers are "
                f"{', '.join(near) or 'none'}",
            )
        return from_scratch(CONFIG_MAPPING[run.model.type], run.model.config)
    source = local_or_id(run)
    try:
        config = AutoConfig.from_pretrained(
            source, revision=run.model.revision, trust_remote_code=run.model.trust_remote_code
        )
    except Exception as error:  # not a model folder, no such Hub id, no network: all are the user's to mend
        reason = explained(error, run.model.revision)
        raise RunError("LS3131", f"model.source: cannot load a model from {source!r}: {reason}") from error
    set_entries(config, run.model.config)
    return config


def with_architectures(config: Any) -> Any:
    """A config that may name none: transformers walks through them where a family has several classes."""
    config.architectures = config.architectures or []
    return config


def causal_entries(run: Run) -> dict[str, Any]:
    """Entries of a causal language model's config: no cache in training, and an encoder's family looks back only.
    Errors: `RunError`."""
    return {"use_cache": False} | ({"is_decoder": True} if needs_decoder(run) else {})


def needs_decoder(run: Run) -> bool:
    """Whether a causal language model of this family reads ahead until its config says that it decodes. Errors:
    `RunError`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = load_config(run)
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)


def texts(config: Any) -> list[Any]:
    """A config and those within it that are of text: of an encoder, of a decoder, of the text of a model of images."""
    parts = [entry(config, name) for name in ("encoder", "decoder", "text_config")]
    return [config] + [t for part in parts if _is_config(part) for t in texts(part)]


def entry(config: Any, name: str, otherwise: Any = None) -> Any:
    """An entry of a config, or `otherwise`. XLNet's config raises an error of its own for its limit of positions,
    because it has none. Where some layers have other values (Gemma 4), the entry is the value of the remaining
    layers."""
    try:
        return getattr(config, name, otherwise)
    except NotImplementedError:
        return otherwise
    except RuntimeError:
        return vars(config).get(name, otherwise)


LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # entries of configs: how often a layer is left out


def leaves_out_layers(config: Any) -> str | None:
    """The entry of a config by which training leaves out layers at random, micro-batch by micro-batch; None: it does
    not."""
    return next((entry for entry in LAYERDROP if (getattr(config, entry, None) or 0) > 0), None)


def local_or_id(run: Run) -> str:
    """The folder, checked to be a model's, or the Hub id. Errors: `RunError`."""
    source = model_folder(str(run.model.source))
    path = Path(source).expanduser()
    if adapters.is_adapter(path):
        raise RunError(
            "LS3132",
            f"model.source: {path} holds only an adapter; name the model that it belongs to, or train it "
            "again with model.adapter.export: merged",
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RunError(
                "LS3133",
                f"model.source: the folder {path} is not a model folder, because it has no config.json; name a "
                "folder that save_pretrained wrote",
            )
        if run.model.revision is not None:
            raise RunError(
                "LS3136", f"model.revision: applies to models of the Hub only, and {path} is none; remove it"
            )
        check_one_save(path, "model.source")
        return str(path)
    if source.startswith((".", "/", "~")):
        raise RunError("LS3134", f"model.source: the folder {path} does not exist; correct the path")
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
                f"from_pretrained reads {single}, even where the others were saved later. Remove one of the two",
            )
        return
