"""Match the labels of the data with those in a pretrained model's config: which output of its head is which label.

In: `model`, and names and values of labels in data order. Out: both in the order of the model's outputs if the names
match, and notes on differences from the model's config. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.sections import ModelSection
from lockstep.tasks.models import heads
from lockstep.tasks.models.heads import Head
from lockstep.tasks.models.model_configs import load_config, local_or_id

_LISTED = 6  # labels listed in a note


@dataclass(frozen=True)
class HeadLabels:
    """Labels of a task in the order of the head's outputs."""

    names: list[str]
    values: list[Any]  # the labels as they stand in rows
    notes: list[str] = field(default_factory=list)


def in_model_order(section: ModelSection, head: Head, names: Sequence[str], values: Sequence[Any]) -> HeadLabels:
    """Order labels as in the model's `id2label` if it names all of them, exactly or ignoring case and whitespace.

    If the model names more labels, its head is kept; labels missing from the data get the model's name as their value.
    Errors: `RunError` if the model's config cannot be read."""
    config_labels = _config_labels(section, head)
    if config_labels is None:
        return HeadLabels([*names], [*values])
    model_names, has_head = config_labels
    if len(set(model_names)) < len(model_names):
        same = next(name for name in model_names if model_names.count(name) > 1)
        what = "get the data's names in this order" if len(names) == len(model_names) else "are drawn from the seed"
        note = (
            f"the model's id2label has {same} twice, and the data have {_listed(names)}: the outputs of its head {what}"
        )
        return HeadLabels([*names], [*values], [note])
    place = _places(names, model_names)
    numbers = all(isinstance(value, int) for value in values)
    if place is None or not (has_head or len(names) == len(model_names)):
        counted = numbers and [*names] == [str(code) for code in range(len(model_names))]
        return HeadLabels([*names], [*values], _different(names, model_names, has_head, counted, head))
    ordered_names, ordered_values = [*model_names], [_value(name, numbers) for name in model_names]
    for name, value in zip(names, values, strict=True):
        ordered_names[place[name]], ordered_values[place[name]] = name, value
    notes = []
    if sorted(place.values()) != [place[name] for name in names]:
        notes.append(f"labels are in the order of the model's id2label: {_listed(ordered_names)}")
    if len(names) < len(model_names):
        notes.append(
            f"the model names {len(model_names)} labels, of which the data have {len(names)}; its head keeps all "
            f"{len(model_names)} outputs"
        )
    renamed = [(name, ours) for name, ours in zip(model_names, ordered_names, strict=True) if name != ours]
    if renamed:
        notes.append(
            f"the model's id2label has {_listed([name for name, _ in renamed])} where the data have "
            f"{_listed([ours for _, ours in renamed])}; the export names them as the data do"
        )
    return HeadLabels(ordered_names, ordered_values, notes)


def problem_notes(section: ModelSection, head: Head, problem: str, outputs: int) -> list[str]:
    """Notes if the head was trained for another `problem_type`, or, for regression, with another number of outputs.
    Errors: `RunError`."""
    if section.type is not None:
        return []
    config = _source_config(section)
    if not names_head(config, head):
        return []
    notes, trained_for = [], getattr(config, "problem_type", None)
    if trained_for not in (None, problem):
        notes.append(
            f"the model's config has problem_type {trained_for!r}, and this run learns {problem!r}, which the export's "
            "config has"
        )
    if problem == "regression" and config.num_labels != outputs:
        notes.append(
            f"the model's head has {config.num_labels} outputs, and the data have {outputs} "
            f"number{'s' * (outputs != 1)} per example: a new head is drawn from the seed"
        )
    return notes


def _source_config(section: ModelSection) -> Any:
    """The config as stored in the model's source."""
    return load_config(section.model_copy(update={"config": {}}))


def names_head(config: Any, head: Head) -> bool:
    """Whether the source has a head of this kind, according to its config's `architectures`."""
    suffix = head.auto.removeprefix("AutoModel")
    return any(name.endswith(suffix) for name in config.architectures or [])


def _config_labels(section: ModelSection, head: Head) -> tuple[list[str], bool] | None:
    """Names of the model's outputs, in order, and whether it has a head of this kind; without a head they are distinct.
    None if the model is built from scratch, or has no head and no names, or none for some of its outputs."""
    if section.type is not None:
        return None
    config = _source_config(section)
    named = _written_labels(section, config)
    names = [str(named[code]) for code in range(len(named)) if code in named]
    has_head = names_head(config, head)
    usable = len(names) == len(named) > 0
    if not usable or not (has_head or (not _unnamed(names) and len(set(names)) == len(names))):
        return None
    return names, has_head


def _written_labels(section: ModelSection, config: Any) -> dict[int, str]:
    """The model's names of its outputs: `id2label`, or, if its config file has none, `label2id`, which transformers
    does not read then."""
    written, _ = type(config).get_config_dict(local_or_id(section), revision=section.revision)
    numbers = written.get("label2id")
    if written.get("id2label") or not isinstance(numbers, dict) or sorted(numbers.values()) != [*range(len(numbers))]:
        return config.id2label or {}
    return {code: name for name, code in numbers.items()}


def _unnamed(names: Sequence[str]) -> bool:
    """Whether these are transformers' default label names."""
    return all(re.fullmatch(f"LABEL_{code}", name) for code, name in enumerate(names))


def _places(names: Sequence[str], model_names: Sequence[str]) -> dict[str, int] | None:
    """Map each label name of the data to a model output; None if the model does not name all of them."""
    reads: tuple[Callable[[str], str], ...] = (str, lambda name: " ".join(name.split()).casefold())
    for read in reads:
        place = {read(name): code for code, name in enumerate(model_names)}
        distinct = len(place) == len(model_names) and len({read(name) for name in names}) == len(names)
        if distinct and all(read(name) in place for name in names):
            return {name: place[read(name)] for name in names}
    return None


def _value(name: str, numbers: bool) -> Any:
    """The row value of a label that is missing from the data."""
    return int(name) if numbers and re.fullmatch("0|[1-9][0-9]*", name) else name


def _different(
    names: Sequence[str], model_names: Sequence[str], has_head: bool, counted: bool, head: Head
) -> list[str]:
    """Notes on labels that differ from the model's. `counted`: the labels are the indices of its outputs."""
    both = f"the model's id2label has {_listed(model_names)}, and the data have {_listed(names)}"
    if not has_head:
        return [f"{both}: the export names the data's"]
    if len(names) != len(model_names) == 2 and _unnamed(model_names):  # also of a config without any number of labels
        return [
            f"the model's config names no labels, and the data have {_listed(names)}: unless its head has {len(names)} "
            "outputs, a new one is drawn from the seed; the export names the data's labels"
        ]
    if len(names) != len(model_names):
        return [f"{both}: a new head is drawn from the seed, and the export names the data's labels"]
    if counted and _unnamed(model_names):
        return []  # LABEL_0 is 0
    if counted:
        if head == heads.TOKEN_CLASSIFICATION:
            mend = ". If they stand for the model's tags, use those in the data"
        else:
            mend = (
                ". If they stand for the model's labels, task.label_names lists the model's names in the order of the "
                "numbers, so that each is learned by its own output"
            )
        return [
            f"{both}: each number is taken as that output of the model's head, and the export names the numbers{mend}"
        ]
    return [
        f"{both}: the outputs of its head get the data's names in this order. If they stand for the same labels, "
        "spell them alike, so that each is learned by its own output"
    ]


def _listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names):,})" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
