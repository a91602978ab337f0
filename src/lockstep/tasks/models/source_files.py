"""Compare a pretrained model's files with the model of its config: missing weights, other shapes, names that the model
does not have.

In: the section `model`, and its model. Out: notes, or a `RunError`. `from_pretrained` initializes missing weights at
random, and reports that only in a log which training does not show; with `ignore_mismatched_sizes`, which a head for
other labels needs, it does the same to any weight of another shape. A partly random base is refused. A missing pooler
is only noted, because models pretrained without one (masked language models) are saved without it. So is a missing head
for labels that the files should hold: their config names it, or they hold a part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.tasks.models import head_labels, heads, source_ties
from lockstep.tasks.models.model_configs import load_config, with_architectures

_OWN_HEADS = (heads.CLASSIFICATION, heads.IMAGE_CLASSIFICATION, heads.TOKEN_CLASSIFICATION, heads.QUESTION_ANSWERING)
_LANGUAGE_HEADS = (heads.CAUSAL, heads.MASKED, heads.SEQ2SEQ)
_NAMES = 3  # in a message
_WRAPPERS = {  # prefixes of names -> who writes them
    "module.": "DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "base_model.model.": "peft",
}

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # name -> (shape in the files, shape by the config)


@dataclass(frozen=True)
class _Built:
    """A model of the run's config, and its base without the head (None if the base cannot be built)."""

    section: ModelSection
    model: Any
    base: Any

    @cached_property
    def base_names(self) -> frozenset[str]:
        return frozenset() if self.base is None else frozenset(self.base.state_dict())

    def in_base(self, name: str) -> bool:
        """Whether a weight belongs to the pretrained part, which every head of the family shares."""
        if self.base is None:
            return name.startswith(f"{self.model.base_model_prefix}.")
        return name in self.base_names or name.partition(".")[2] in self.base_names

    def lacking(self, present: Collection[str]) -> list[str]:
        """Trained weights that neither `present` nor a tie provides, without those that transformers expects to be
        missing."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.model.named_parameters(remove_duplicate=False):
            if tensor.requires_grad:  # Marian's positions are computed
                names.setdefault(id(tensor), []).append(name)
        expected = [*(self.model._keys_to_ignore_on_load_missing or ())]
        return [
            tied[0]
            for tied in names.values()
            if not any(name in present for name in tied) and not any(re.search(e, tied[0]) for e in expected)
        ]


def _build(section: ModelSection, head: str, entries: Mapping[str, Any] | None = None) -> _Built | None:
    """Build the run's model on the meta device; None if it has no source, or needs memory to be built. `entries`: what
    the task sets in its config, such as the number of labels."""
    if section.source is None:
        return None
    import transformers

    built: list[Any] = []
    for auto in (heads.of(head).auto, "AutoModel"):
        model = None
        with suppress(Exception), torch.device("meta"):  # inconsistent sizes are refused elsewhere
            config = with_architectures(load_config(section))
            if getattr(config, "quantization_config", None) is not None:  # names and shapes are the quantizer's
                return None
            for name, value in (entries or {}).items():
                setattr(config, name, value)
            model = getattr(transformers, auto).from_config(config, trust_remote_code=section.trust_remote_code)
        built.append(model)
        if model is None and not built[1:]:
            return None
    return _Built(section, *built)


def check(section: ModelSection, head: str, entries: Mapping[str, Any] | None = None) -> None:
    """Refuse, before any process starts, a config that does not match the model's files, as far as their headers can be
    read without a download. `entries`: what the task sets in the config; None if it is not known yet, so that a head's
    shapes are not compared. Errors: `RunError`."""
    built = _build(section, head, entries)
    if built is None or not source_ties.stored_names(section):
        return
    places = source_ties.places(built.model, source_ties.stored_names(section))
    _refuse_lacking(built, places, places)
    differing = _differing(built)
    if entries is None:
        differing = {name: of for name, of in differing.items() if head not in _OWN_HEADS or built.in_base(name)}
    refuse(section, built.model, head, differing)


def _differing(built: _Built) -> Shapes:
    """Weights that the files hold in another shape than the model's."""
    there = {name: tuple(tensor.shape) for name, tensor in built.model.state_dict().items()}
    stored = source_ties.stored_shapes(built.section)
    single = source_ties.places(built.model, stored, made_of_several=False)
    shapes = {name: stored[origin] for name, origin in single.items() if name in there}
    return {name: (shapes[name], ours) for name, ours in there.items() if shapes.get(name, ours) != ours}


def check_loaded(section: ModelSection, head: str, model: Any, info: Mapping[str, Any]) -> None:
    """Refuse a model in whose base `from_pretrained` initialized weights at random; `check` cannot read files that are
    not downloaded yet. `info`: its report. Errors: `RunError`."""
    differing = {name: (tuple(stored), tuple(built)) for name, stored, built in info["mismatched_keys"]}
    refuse(section, model, head, differing)
    missing = set(info["missing_keys"])
    built = _build(section, head) if missing else None
    if built is not None:
        present = {name for name, _ in model.named_parameters(remove_duplicate=False)} - missing
        _refuse_lacking(built, present, dict.fromkeys(info["unexpected_keys"]))


def check_whole(folder: Any, model: Any, info: Mapping[str, Any]) -> None:
    """Refuse an export with missing weights (also of the head), weights of another shape, or weights that the model of
    its config does not have. `info`: the report of `from_pretrained`. Errors: `RunError`."""
    _refuse_shapes(folder, {name: (tuple(stored), tuple(built)) for name, stored, built in info["mismatched_keys"]})
    _refuse_unread(folder, model, sorted(info["unexpected_keys"]))
    missing = {*info["missing_keys"]} & {name for name, _ in model.named_parameters(remove_duplicate=False)}
    _refuse_drawn(folder, model, sorted(missing))


def check_export(section: ModelSection, head: str) -> None:
    """Check an export that is the run's `model.source`, as `check_whole` does. Errors: `RunError`."""
    if (built := _build(section, head)) is not None:
        _check_export(built)


def check_edited(folder: Path) -> None:
    """Check an export whose config was edited, with the model class that the config names, if transformers has it.
    Errors: `RunError`."""
    import transformers

    _refuse_other_type(folder)
    section = ModelSection.model_validate({"source": str(folder)})
    model = None
    with suppress(Exception), torch.device("meta"):  # a model that needs memory to be built
        config = load_config(section)
        model = getattr(transformers, config.architectures[0])(config)
    if model is not None:
        _check_export(_Built(section, model, None))


def _refuse_other_type(folder: Path) -> None:
    import transformers

    with suppress(OSError, ValueError, AttributeError, TypeError, LookupError, ImportError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name, model_type = config["architectures"][0], config["model_type"]
        expected = getattr(transformers, name).config_class.model_type
        if expected != model_type:
            raise RunError(
                "LS3496",
                f"{folder}: its config.json names the class {name}, whose model_type is {expected}, but says "
                f"{model_type!r}; restore config.json",
            )


def _check_export(built: _Built) -> None:
    folder, stored = built.section.source, source_ties.stored_names(built.section)
    if not stored:
        return
    places = source_ties.places(built.model, stored)
    _refuse_shapes(folder, _differing(built))
    _refuse_unread(folder, built.model, _unused(built, places))
    _refuse_drawn(folder, built.model, built.lacking(places))


def _refuse_shapes(folder: Any, differing: Shapes) -> None:
    for name, (stored, built) in sorted(differing.items())[:1]:
        more = f" (and {len(differing) - 1:,} more)" if len(differing) > 1 else ""
        raise RunError(
            "LS3494",
            f"{folder}: its files hold {name}{more} with the shape {list(stored)}, but its config.json gives it the "
            f"shape {list(built)}; restore config.json",
        )


def _refuse_unread(folder: Any, model: Any, names: list[str]) -> None:
    if names:
        raise RunError(
            "LS3495",
            f"{folder}: its files hold {_listed(names)}, for which the {type(model).__name__} of its config.json has "
            "no place: it would compute without them; restore config.json",
        )


def _refuse_drawn(folder: Any, model: Any, names: list[str]) -> None:
    if names:
        raise RunError(
            "LS3492",
            f"{folder}: its files lack {_listed(names)} of {type(model).__name__}, which would be drawn at "
            "random; restore these files, or write the export again (remove it, and run lockstep train again)",
        )


def notes(section: ModelSection, head: str | None, entries: Mapping[str, Any] | None = None) -> list[str]:
    """Notes on weights that are drawn at random although a pretrained model may have them (its pooler, the head of a
    language model, a head for labels that the files should hold), and on weights in the files that the model does not
    use. `entries`: what the task sets in the config. Errors: `RunError`."""
    built = None if head is None else _build(section, head, entries)
    stored = () if built is None else source_ties.stored_names(section)
    if head is None or built is None or not stored:
        return []
    places = source_ties.places(built.model, stored)
    whose = head in _LANGUAGE_HEADS or _should_hold(built, heads.of(head), places)
    absent = [
        name
        for name in built.lacking(places)
        if (_is_pooler(name) and head != heads.EMBEDDING) or (whose and not built.in_base(name))
    ]
    texts = []
    if absent:
        texts.append(
            f"model.source: the files of {section.source} lack {_listed(absent)}: initialized at random, from the seed"
        )
    if other := _differing(built) if head in _OWN_HEADS else {}:
        name, (of, ours) = next(iter(other.items()))
        texts.append(
            f"model.source: the files of {section.source} hold {_listed(other)} for another number of labels "
            f"({name}: {list(of)}, here {list(ours)}): initialized at random, from the seed"
        )
    if unused := [] if section.config else _unused(built, places):
        texts.append(
            f"model.source: the files of {section.source} hold {_listed(unused)}, which the model of its "
            "config.json does not have: not used"
        )
    return texts


def _should_hold(built: _Built, head: heads.Head, present: Collection[str]) -> bool:
    """Whether the files should hold a head for labels: their config names one of the kind, or a part of it is there."""
    own = [name for name in built.model.state_dict() if not built.in_base(name) and not _is_pooler(name)]
    return any(name in present for name in own) or head_labels.names_head(load_config(built.section), head)


def _is_pooler(name: str) -> bool:
    return "pooler" in name.split(".")


def _unused(built: _Built, places: Mapping[str, str]) -> list[str]:
    """Names in the files that the model does not use: of additional layers, of additional weights in its layers (norms
    of another family, an unmerged adapter), of a bias beside a weight, and, for a model saved with its head, of
    additional parts (the value head of a model trained by PPO)."""
    names = set(built.model.state_dict())
    ignored = [*(built.model._keys_to_ignore_on_load_unexpected or ())]
    based = {name for name in names if built.in_base(name)}
    patterns = {_pattern(name) for name in based}
    layers = {pattern.partition(".*.")[0] for pattern in patterns if ".*." in pattern}
    parts = {name.partition(".")[0] for name in (*names, *built.base_names)} | {built.model.base_model_prefix}
    whole = type(built.model).__name__ in (load_config(built.section).architectures or ())
    return [
        origin
        for name, origin in places.items()
        if name not in names
        and not any(re.search(each, name) for each in ignored)
        and (
            _pattern(name) in patterns
            or (name.endswith(".bias") and _weight_beside(name) in based)
            or (name.endswith(".weight") and _pattern(name).partition(".*.")[0] in layers)
            or (whole and name.partition(".")[0] not in parts)
        )
    ]


def _weight_beside(bias: str) -> str:
    return f"{bias.removesuffix('.bias')}.weight"


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _NAMES:,} more" if len(every) > _NAMES else ""
    return ", ".join(every[:_NAMES]) + more


def _refuse_lacking(built: _Built, present: Collection[str], places: Mapping[str, Any]) -> None:
    """`present`: weights of the model that the files hold. `places`: name in the model, or without a place there ->
    name in the files. Errors: `RunError` if the base is not whole."""
    lacking = built.lacking(present)
    base = [name for name in lacking if built.in_base(name) and not _is_pooler(name)]
    none = lacking and not any(name in present for name, _ in built.model.named_parameters(remove_duplicate=False))
    if not base and not none:
        return
    source, kind = built.section.source, type(built.model).__name__
    hint = _hint(built, [name for name in places if name not in built.model.state_dict()])
    trained = [name for name, _ in built.model.named_parameters() if built.in_base(name) and not _is_pooler(name)]
    if len(base) < len(trained) and not none:
        raise RunError(
            "LS3491",
            f"model.source: {source} lacks {_listed(base)} of {kind}, which would be drawn at random among "
            f"pretrained weights{hint or _depth(built.section)}",
        )
    first = next(iter(places.values()), None) or next(iter(places), "none")
    hint = hint or "; save it with save_pretrained of transformers"
    raise RunError(
        "LS3490",
        f"model.source: {source} holds no weight of {kind}, so the whole model would be random: expected "
        f"names such as {(base or lacking)[0]}, and its files have {first}{hint}",
    )


def _depth(section: ModelSection) -> str:
    if section.config:
        return f"; leave out entries of model.config ({', '.join(section.config)}) that enlarge the model"
    return (
        "; correct its config.json, or restore its files. To train new weights beside pretrained ones, save the "
        "model that from_pretrained builds, and name that folder"
    )


def _hint(built: _Built, unplaced: list[str]) -> str:
    """How to make the files readable, if their unplaced names show it."""
    trained = {name for name, _ in built.model.named_parameters() if built.in_base(name)}
    for prefix in dict.fromkeys([*_WRAPPERS, *(f"{name.split('.')[0]}." for name in unplaced)]):
        cut = [name.removeprefix(prefix) for name in unplaced if name.startswith(prefix)]
        if cut and prefix != f"{built.model.base_model_prefix}." and trained & {*source_ties.places(built.model, cut)}:
            whose = f" ({_WRAPPERS[prefix]} adds it)" if prefix in _WRAPPERS else ""
            if prefix not in _WRAPPERS and built.base is not None and _covers(built.base, unplaced):
                break
            return f"; save the weights under names without {prefix!r}{whose}"
    if built.base is not None and _covers(built.base, unplaced):
        return (
            f"; {type(built.base).__name__} reads these files: save it alone "
            f"(AutoModel.from_pretrained({built.section.source!r}).save_pretrained(FOLDER)), and set "
            "model.source=FOLDER"
        )
    return ""


def _covers(model: Any, names: list[str]) -> bool:
    """Whether names in files give a model all its weights."""
    places = source_ties.places(model, names)
    return all(name in places for name, tensor in model.named_parameters() if tensor.requires_grad)


def refuse(section: ModelSection, model: Any, head: str, differing: Shapes) -> None:
    """Refuse weights of mismatched shapes, except those of a label head for another number of labels. Errors:
    `RunError`."""
    base = f"{model.base_model_prefix}."
    wrong = {
        name: (stored, built)
        for name, (stored, built) in sorted(differing.items())
        if head not in _OWN_HEADS or name.startswith(base) or not _for_other_labels(stored, built, model.config)
    }
    if not wrong:
        return
    name, (stored, built) = next(iter(wrong.items()))
    more = f" (and {len(wrong) - 1:,} more)" if len(wrong) > 1 else ""
    what = "its config.json defines another shape; correct it"
    if section.config:
        what = f"model.config ({', '.join(section.config)}) defines another shape; remove such entries"
    add = ""
    if not section.config or "vocab_size" in section.config:
        add = "; to add rows for tokens, save the model after resize_token_embeddings of transformers"
    raise RunError(
        "LS3442",
        f"model.source: {section.source} holds {name}{more} with the shape {list(stored)}, and {what}. The weight "
        f"would be drawn at random with the shape {list(built)}, and its pretrained values would be lost{add}",
    )


def _for_other_labels(stored: tuple[int, ...], built: tuple[int, ...], config: Any) -> bool:
    """Whether shapes differ only in the number of labels."""
    if len(stored) != len(built):
        return False
    other = [ours for of, ours in zip(stored, built, strict=True) if of != ours]
    return other == [config.num_labels]
