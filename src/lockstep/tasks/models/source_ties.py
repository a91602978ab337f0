"""Determine which weights a pretrained model ties, as `from_pretrained` does: by its config and its files.

In: an empty model of the source's config, and the source's files. Out: the same model with the ties that
`from_pretrained` would leave. A file may hold a separate head although its config says `tie_word_embeddings: true` (a
merge, a resized vocabulary); transformers then leaves head and embedding untied, and ranks that build from the config
and receive weights by name must do the same. Only names are read, and tensors if both sides of a tie are present.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.data.hub import downloading, reading_weights
from lockstep.tasks.models import tie_entry
from lockstep.tasks.models.model_configs import local_or_id

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"


def apply(section: ModelSection, model: Any) -> None:
    """Untie, in place, the weights that `from_pretrained` does not tie for the run's source; no effect from scratch.

    `model`: a transformers model built from the config. Errors: `RunError` if files cannot be read, or hold a tied
    weight of another shape."""
    names = own_weights(section, model)
    for name in names:
        parent, _, last = name.rpartition(".")
        module = model.get_submodule(parent)
        weight = getattr(module, last)
        module.register_parameter(last, nn.Parameter(torch.empty_like(weight), weight.requires_grad))
        model.all_tied_weights_keys.pop(name, None)
    if names:
        tie_entry.write_down(model)


def check(section: ModelSection, model: Any, auto: Any) -> None:
    """Check that `apply` unties the same weights as `from_pretrained`, and record untied weights in the model's config.

    `model`: loaded by `from_pretrained`. `auto`: its Auto class. Errors: `RunError` if the ties differ."""
    if not type(model).__module__.startswith("transformers."):  # code from the Hub may need memory to be built
        return
    with torch.device("meta"):
        empty = auto.from_config(model.config)
    names = own_weights(section, empty)
    tied_pairs = _tied(empty)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    untied = {t for t, s in tied_pairs.items() if parameters.get(t) is not parameters.get(s)}
    if untied != set(names):
        raise RunError(
            "LS3420",
            f"model.source: from_pretrained leaves {_list(untied)} untied, but the names in the files say "
            f"{_list(names)}; please report this family ({model.config.model_type})",
        )
    if names:
        tie_entry.write_down(model)


def _list(names: Any) -> str:
    return ", ".join(sorted(names)) or "no weight"


def _tied(model: Any) -> dict[str, str]:
    """Weight -> the weight it is tied to; empty for a model with foreign code."""
    pairs: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {t: s for t, s in pairs.items() if t in parameters and s in parameters}


def own_weights(section: ModelSection, model: Any) -> tuple[str, ...]:
    """Names of weights that the config ties but `from_pretrained` does not, because the source holds different values.

    `model`: built from the config, on the meta device. Errors: `RunError`."""
    pairs = _tied(model)
    if section.source is None or not pairs:
        return ()
    source = local_or_id(section)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    present = places(model, _names(source, section.revision))
    both = {t: s for t, s in pairs.items() if t in present and s in present}
    if not both:
        return ()
    tensors = _read(source, section.revision, frozenset(present[n] for n in {*both, *both.values()}))
    for name in sorted({*both, *both.values()}):
        if tuple(tensors[present[name]].shape) != shapes[name]:
            raise RunError(
                "LS3421",
                f"model.source: {present[name]} has the shape {list(tensors[present[name]].shape)} in the files, and "
                f"the model's config gives it {list(shapes[name])}; from_pretrained would leave it without values, "
                "because the config ties it. Save the model again with resize_token_embeddings, or with "
                "tie_word_embeddings: false in its config.json",
            )
    return _decided(model, pairs, both, {name: tensors[present[name]] for name in {*both, *both.values()}})


def _decided(
    model: Any, pairs: Mapping[str, str], both: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Let transformers' own `tie_weights` decide, with these tensors in the model."""
    before = {name: model.get_parameter(name) for name in {*pairs, *pairs.values()}}
    mapping = dict(model.all_tied_weights_keys)
    try:
        for name, tensor in tensors.items():
            _put(model, name, nn.Parameter(tensor, requires_grad=False))
        missing = {name for name in before if name not in tensors}
        model.tie_weights(missing_keys=missing, recompute_mapping=False)
        return tuple(sorted(t for t, s in both.items() if model.get_parameter(t) is not model.get_parameter(s)))
    finally:
        for name, parameter in before.items():
            _put(model, name, parameter)
        model.all_tied_weights_keys = mapping


def _put(model: Any, name: str, parameter: nn.Parameter) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, parameter)


def places(model: Any, names: Iterable[str], made_of_several: bool = True) -> dict[str, str]:
    """Name in the model -> name in the files, after the renaming of `from_pretrained`; a name for which the model has
    no place is a key, too. `made_of_several`: include weights that it merges or splits."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    shapes = dict(model.state_dict())
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    targets = {pattern: each.target_patterns for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix
    present: dict[str, str] = {}
    for name in sorted(names, key=dot_natural_key):  # some renamings begin at the first name of a kind
        renamed, converted = rename_source_key(name, renamings, converters, prefix, shapes)
        if renamed not in shapes and name in shapes:
            renamed, converted = rename_source_key(name, [], [], prefix, shapes)
        if converted is None:
            present[renamed] = name
        elif made_of_several:
            present |= dict.fromkeys(_converted(renamed, targets[converted]), name)
    return present


def _converted(first: str, patterns: Sequence[str]) -> Iterator[str]:
    """Names of the weights that a conversion makes; `first`: the one that matches the first pattern."""
    begin = re.escape(patterns[0]).replace(re.escape(r"\1"), "(.+?)")
    yield first
    for pattern in patterns[1:]:
        yield re.sub(begin, pattern, first, count=1)


def _file(source: str, name: str, revision: str | None, here: bool = False) -> Path | None:
    """Path of a source's file, or None. `here`: only if already downloaded, as always under HF_HUB_OFFLINE."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    here = here or constants.HF_HUB_OFFLINE  # offline, a missing file would raise an error
    try:
        return Path(hf_hub_download(source, name, revision=revision, local_files_only=here))
    except LocalEntryNotFoundError:
        if here:
            return None
        raise
    except EntryNotFoundError:
        return None


def _index(source: str, revision: str | None, here: bool) -> tuple[Path, dict[str, str] | None] | None:
    """Return the weight file that `from_pretrained` loads (if sharded: the index, and weight -> file)."""
    import json

    for name in (_SAFE, _PICKLED):
        if (path := _file(source, name, revision, here)) is not None:
            return path, None
        if (path := _file(source, f"{name}.index.json", revision, here)) is not None:
            return path, dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    return None


def _names(source: str, revision: str | None) -> tuple[str, ...]:
    """Names of the weights in the files. For a Hub repository that is not downloaded, the headers suffice."""
    index = _index(source, revision, here=True)
    if index is None and not Path(source).is_dir():
        if there := _shapes_on_hub(source, revision):
            return tuple(there)
        with downloading(source, "model"):
            index = _index(source, revision, here=False)
    if index is None:
        return ()
    path, weight_map = index
    return tuple(weight_map) if weight_map is not None else _names_in(path, path.stat().st_mtime_ns)


def stored_shapes(section: ModelSection) -> dict[str, tuple[int, ...]]:
    """Name in the source's files -> shape, as far as their headers can be read without a download; empty if not. A
    shard that is not on this machine is left out. Errors: `RunError`."""
    from huggingface_hub import constants

    source, revision = local_or_id(section), section.revision
    index = _index(source, revision, here=True)
    if index is None:
        there = not Path(source).is_dir() and not constants.HF_HUB_OFFLINE
        return dict(_shapes_on_hub(source, revision)) if there else {}
    path, weight_map = index
    files = [path] if weight_map is None else [_file(source, n, revision, True) for n in sorted({*weight_map.values()})]
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes |= {} if file is None else _shapes_in(file, file.stat().st_mtime_ns)
    return shapes


def stored_names(section: ModelSection) -> tuple[str, ...]:
    """Names of the weights in the source's files, including shards that are not on this machine; empty if they cannot
    be read without a download. Errors: `RunError`."""
    index = _index(local_or_id(section), section.revision, here=True)
    return tuple(stored_shapes(section)) if index is None or index[1] is None else tuple(index[1])


@lru_cache(maxsize=8)
def _shapes_on_hub(source: str, revision: str | None) -> dict[str, tuple[int, ...]]:
    """Shapes from the headers of a repository's files; empty if it has no such files or the server cannot send parts
    of one."""
    from huggingface_hub import get_safetensors_metadata

    with suppress(Exception):
        files = get_safetensors_metadata(source, revision=revision).files_metadata
        return {n: tuple(tensor.shape) for file in files.values() for n, tensor in file.tensors.items()}
    return {}


@lru_cache(maxsize=64)
def _shapes_in(path: Path, changed: int) -> dict[str, tuple[int, ...]]:
    with reading_weights(str(path)):
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return {n: tuple(t.shape) for n, t in torch.load(path, map_location="meta", weights_only=True).items()}


@lru_cache(maxsize=64)
def _names_in(path: Path, changed: int) -> tuple[str, ...]:
    with reading_weights(str(path)):
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                return tuple(file.keys())
        return tuple(torch.load(path, map_location="meta", weights_only=True))


def _read(source: str, revision: str | None, names: frozenset[str]) -> dict[str, Tensor]:
    """Read these weights from the files."""
    with downloading(source, "model"):
        index = _index(source, revision, here=False)
        if index is None:
            return {}
        path, weight_map = index
        paths: dict[Path, set[str]] = {}
        for name in names:
            file = path if weight_map is None else _file(source, weight_map[name], revision)
            if file is None:
                raise RunError("LS3422", f"model.source: {path} names a missing {weight_map and weight_map[name]}")
            paths.setdefault(file, set()).add(name)
    tensors: dict[str, Tensor] = {}
    for file, selected in paths.items():
        with reading_weights(str(file)):
            if file.suffix == ".safetensors":
                from safetensors import safe_open

                with safe_open(file, "pt") as opened:
                    tensors |= {name: opened.get_tensor(name) for name in selected}
            else:
                weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                tensors |= {name: weights[name] for name in selected}
    return tensors
