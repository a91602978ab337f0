"""Several sources of examples, and how often each is drawn from: what `data.sources` is made of.

In: `[{source: web.jsonl, weight: 3}, {source: books/, weight: 1}]`. Out: the same, typed and named, or a `ValueError`
that names the source and its key.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lockstep.config.addresses import PathText
from lockstep.config.file_keys import Layout, Quote, Separator
from lockstep.config.row_filters import Filter

Weight = float | list[tuple[int, float]]
# Keys that each source has for itself; of `data` they are given where there is one source only.
_READING = ("layout", "columns", "separator", "quote", "encoding", "filter", "split_column")
OWN = ("source", "config", "revision", "train", "validation", "test", *_READING)


class OneSource(BaseModel):
    """A source of a mixture. Its keys, besides `name`, `weight` and `rename`, are those of `data`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^\w+$", description="what metrics call it; default: that of its file, folder or Hub id")
    weight: Weight | None = Field(
        None,
        description="share of the examples of a step, beside the others' weights; or a list of [step, weight], each "
        "from that step on; default: its number of examples",
    )
    rename: dict[str, str] = Field(
        default_factory=dict, description="the task's column: what it is called here (also a dotted path)"
    )
    source: PathText | None = Field(None, description="as data.source")
    config: str | None = Field(None, description="as data.config")
    revision: str | None = Field(None, description="as data.revision")
    train: PathText | list[PathText] | None = Field(None, description="as data.train")
    validation: PathText | list[PathText] | None = Field(None, description="as data.validation")
    test: PathText | list[PathText] | None = Field(None, description="as data.test")
    layout: Layout = Field("rows", description="as data.layout")
    columns: list[str] | None = Field(None, min_length=1, description="as data.columns")
    separator: Separator | None = Field(None, description="as data.separator")
    quote: Quote | None = Field(None, description="as data.quote")
    encoding: str = Field("utf-8", description="as data.encoding")
    filter: Filter = Field(default_factory=dict, description="as data.filter")
    split_column: str | None = Field(None, description="as data.split_column")

    @property
    def own(self) -> dict[str, Any]:
        """The keys of `data` that it gives."""
        return {key: getattr(self, key) for key in OWN}

    @property
    def schedule(self) -> list[tuple[int, float]]:
        """(step, weight), each from that step on; nothing where the number of examples decides."""
        if self.weight is None:
            return []
        return list(self.weight) if isinstance(self.weight, list) else [(0, self.weight)]


def _explained(values: Any) -> Any:
    """Errors: `ValueError`, which names the source."""
    if not isinstance(values, list) or not values:
        raise ValueError(f"wanted is a list of sources, such as [{{source: web.jsonl, weight: 2}}], and not {values!r}")
    found = [_named(value, place) for place, value in enumerate(values)]
    entries = [value if isinstance(value, OneSource) else _entry(value) for value in found]
    names = Counter(entry.name for entry in entries)
    if (twice := names.most_common(1)[0])[1] > 1:
        raise ValueError(f"two sources are called {twice[0]}: give each a name of its own")
    if "scale" in names:
        raise ValueError("a source may not be called scale: metrics have a loss_scale already; give it another name")
    without = [entry.name for entry in entries if entry.weight is None]
    if 0 < len(without) < len(entries):
        raise ValueError(f"{without[0]} has no weight, and others have: give one to every source, or to none")
    for entry in entries:
        _check_weight(entry)
    return entries


def _named(value: Any, place: int) -> Any:
    """With a name, from what it is read from."""
    if isinstance(value, OneSource):
        return value
    value = {"source": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise ValueError(f"source {place + 1}: wanted is a mapping of keys, and not {value!r}")
    if value.get("name") is None:
        train = value.get("train")
        given = str(value.get("source") or (train[0] if isinstance(train, list) and train else train) or "")
        name = re.sub(r"\W+", "_", Path(given).name.split(".")[0]).strip("_")
        value = {**value, "name": name or f"source_{place + 1}"}
    return value


def _entry(value: Mapping[str, Any]) -> OneSource:
    """Errors: `ValueError`."""
    name = value["name"]
    try:
        entry = OneSource.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, OneSource.model_fields, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"{name}: unknown key {key!r}; {hint}known are {', '.join(OneSource.model_fields)}"
            ) from None
        if first["type"] == "value_error":
            raise ValueError(f"{name}: {key}: {first['ctx']['error']}") from None
        about = OneSource.model_fields[key].description
        raise ValueError(f"{name}: {key}: {value.get(key)!r} will not do: {about}") from None
    if entry.source is None and entry.train is None:
        raise ValueError(f"{name}: give source (a Hub id, a folder or a file) or train (files)")
    return entry


def _check_weight(entry: OneSource) -> None:
    """Errors: `ValueError`."""
    for step, weight in entry.schedule:
        if not 0 < weight < float("inf"):
            raise ValueError(
                f"{entry.name}: weight: {weight:g} will not do: it must be more than 0; leave a source out "
                "that is not to be used"
            )
        if step < 0:
            raise ValueError(f"{entry.name}: weight: step {step} is before the first, 0")
    steps = [step for step, _ in entry.schedule]
    if entry.weight is not None and (not steps or steps[0] != 0 or steps != sorted(set(steps))):
        raise ValueError(
            f"{entry.name}: weight: {[list(point) for point in entry.schedule]} will not do: wanted is [[0, weight], "
            "[step, weight], ...], steps in order, the first of them 0"
        )


Mixture = Annotated[list[OneSource], BeforeValidator(_explained)]
