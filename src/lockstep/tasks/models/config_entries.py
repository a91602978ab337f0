"""Entries of a model's config: which names a config class knows, and a config with the run's entries.

In: a config, or its class, and the entries of `model.config`. Out: the config, as transformers makes it of these
entries; or a `RunError` that names the entry, and the nearest name that the class knows.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from lockstep.config.run import RunError

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
    kind = type(config)
    settable = [name for name, value in inspect.getmembers_static(kind, _is_settable) if not name.startswith("_")]
    # a constant of the class is an entry where the instance has none of its own (a family that fixes one)
    fixed = [name for name in vars(PreTrainedConfig) if not name.startswith("_")]
    constants = [
        name
        for name, value in inspect.getmembers_static(kind)
        if not name.startswith("_") and name not in fixed and isinstance(value, bool | int | float | str)
    ]
    own = [name for name in vars(config) if not name.startswith("_")]
    return sorted({*own, *kind.attribute_map, *settable, *constants})


def _is_settable(value: Any) -> bool:
    return isinstance(value, property) and value.fset is not None


def set_entries(config: Any, entries: Mapping[str, Any], at: str = "model.config") -> None:
    """Set entries of a config one by one, in place, and those of a config within it for which a mapping is given.
    Errors: `RunError`."""
    known = set(names(config))
    for key, value in entries.items():
        present = vars(config).get(key)  # reading an entry by its name may raise an error
        if key == "model_type":
            if value != config.model_type:
                raise RunError(f"{at}.model_type: {value!r}, but this config is of the type {config.model_type!r}")
            continue
        if key not in known:
            raise RunError(_unknown(config, key, known, at))
        if key in _ELSEWHERE and value not in (None, True, "float32"):
            raise RunError(f"{at}.{key}: {value!r} will not do: {_ELSEWHERE[key]}")
        if isinstance(present, PreTrainedConfig):
            if not isinstance(value, Mapping):
                raise RunError(f"{at}.{key}: a mapping of entries is needed, not {value!r}")
            set_entries(present, value, f"{at}.{key}")
            continue
        try:
            setattr(config, key, value)
        except _UNFIT as error:
            raise RunError(f"{at}.{key}: {value!r} will not do: {_line(error)}") from None


def _unknown(config: Any, key: str, known: set[str], at: str) -> str:
    near = difflib.get_close_matches(key, sorted(known), 1) or [
        name for name in known if _letters(name) == _letters(key)
    ]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{at}: a config of the type {config.model_type!r} has no entry {key!r}{hint}"


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def from_scratch(kind: Any, entries: Mapping[str, Any]) -> Any:
    """A config of this class, made of the entries as transformers makes it: what a family derives from them (the size
    of a head, the kinds of layers, a decoder's layers) follows. Errors: `RunError`."""
    parts = _parts(kind, entries)
    set_entries(_usual(kind, parts), entries)  # names, and types, by the key
    specs = kind.sub_configs_defaults  # a decoder is one, unless something else is said
    parts = {k: (dict(specs[k].init_kwargs) if k in specs else {}) | v for k, v in parts.items()}
    wanted = {k: v for k, v in copy.deepcopy(dict(entries) | parts).items() if k != "model_type"}
    try:
        config = kind(**wanted)
    except _UNFIT as error:
        raise RunError(f"model.config: this will not do: {_line(error)}") from None
    for name, given in _parts(kind, entries).items():  # a config within it that is none unless entries make it
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            known = {"model_type", *names(type(part)())}
            for key in given:
                if key not in known:
                    raise RunError(_unknown(part, key, known, f"model.config.{name}"))
    return config


def derives(kind: Any, entries: Mapping[str, Any]) -> bool:
    """Whether entries decide about others. Until 2026-11-24 those others kept their defaults where no entry was a
    mapping for a config within the config. Errors: `RunError`."""
    parts = _parts(kind, entries)
    config = _usual(kind, parts)
    if parts or config.is_heterogeneous:
        return False
    set_entries(config, entries)
    return bool(config.to_dict() != from_scratch(kind, entries).to_dict())


def _parts(kind: Any, entries: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The mappings that are given for configs within the config."""
    return {k: dict(v) for k, v in entries.items() if k in kind.sub_configs and isinstance(v, Mapping)}


def _usual(kind: Any, parts: Mapping[str, Mapping[str, Any]]) -> Any:
    """The config of this class with the types within it that are named: what has which entries. Errors: `RunError`."""
    try:
        return kind(**{k: {"model_type": v["model_type"]} for k, v in parts.items() if "model_type" in v})
    except _UNFIT as error:
        raise RunError(f"model: transformers makes no {kind.model_type} of this: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
