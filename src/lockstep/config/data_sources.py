"""Types of the section `data`: file layouts, remote addresses, row filters, mixtures of sources, streams.

In: values of keys, such as `[{source: web.jsonl, weight: 3}, {source: books/, weight: 1}]` or `{text: {min_words:
3}}`. Out: validated values, or a `ValueError` that names the source, the key and the values allowed.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)

from lockstep.config.errors import InvalidValue

_NAMES = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "bar": "|", "pipe": "|", "space": " "}
LAYOUT = (
    "of local files; class_folders: one file per text or image, in a folder named after its label; parallel: "
    "equally numbered lines of train.en and train.de (or .gz, ...) are one example; conll: a word and its tags per "
    "line, blank lines between sentences; squad: SQuAD's JSON; columns: JSON that maps each column to the list of "
    "its values; records: a JSON document with one list of rows"
)
SEPARATOR = (
    "separator of cells in .csv and .tsv files: one character, or tab, comma, semicolon, bar, space; default: comma "
    "in .csv, tab in .tsv"
)
QUOTE = (
    "quotes around cells of .csv and .tsv files that contain a separator or an end of line; none: quotes are "
    "ordinary characters; default: double, unless the file is clearly not quoted"
)


TYPES = (
    "types of columns, by name, where the detected type is wrong: text (exactly as in the file), integer or number; "
    "for a column of lists, the type of an element"
)


def _character(value: Any) -> Any:
    return _NAMES.get(value, value) if isinstance(value, str) else value


def _one(value: str) -> str:
    """Check that a separator is one character. Errors: `ValueError`."""
    if len(value) != 1 or value in "\r\n\"'" or value.isalnum():
        raise InvalidValue(
            "LS1010",
            f"invalid value {value!r}; expected one character that is not a letter, digit or quote, or a name "
            "such as tab",
        )
    return value


Separator = Annotated[str, BeforeValidator(_character), AfterValidator(_one)]
Layout = Literal["rows", "class_folders", "parallel", "conll", "squad", "columns", "records"]
Quote = Literal["double", "single", "none"]
Types = dict[str, Literal["text", "integer", "number"]]


# Split -> its usual names in folders, columns and on the Hub.
USUAL = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


STORES = ("s3", "gs", "az")  # object stores: read, listed, written
READ_ONLY = ("https", "http", "hf")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# Aliases of other libraries -> our scheme.
_ALSO = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "wasb": "az", "wasbs": "az"}


@dataclass(frozen=True)
class Address:
    """`scheme://place/path`. `place`: a bucket, container or host, or for hf: datasets/USER/REPO[@REVISION]."""

    scheme: str
    place: str
    path: str  # without leading and trailing slashes

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}" + (f"/{self.path}" if self.path else "")

    @property
    def root(self) -> str:
        """`scheme://place`: the bucket or server."""
        return f"{self.scheme}://{self.place}"

    def below(self, path: str) -> Address:
        """Return the address of `path` under this one."""
        return Address(self.scheme, self.place, "/".join(filter(None, (self.path, path))))


def is_address(text: object) -> bool:
    """Return whether a value has a scheme (known or not), as local paths do not."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


def address_of(text: str) -> Address:
    """Parse a text for which `is_address` is true. Errors: `ValueError`."""
    match = _SCHEME.match(text)
    assert match is not None
    scheme, rest = match[1].lower(), text[match.end() :]
    known = (*STORES, *READ_ONLY)
    if scheme not in known:
        near = _ALSO.get(scheme) or next(iter(difflib.get_close_matches(scheme, known, 1)), None)
        hint = f"did you mean {near}://? " if near else "a file of this machine is named by its path alone; "
        raise InvalidValue(
            "LS1011", f"{text}: unknown scheme {scheme}://; {hint}known are {', '.join(f'{s}://' for s in known)}"
        )
    if scheme in ("https", "http") and re.search(r"[?#]", rest):
        raise InvalidValue("LS1012", f"{text}: an address with ? or # cannot be used; name the file itself")
    parts = [part for part in rest.split("/") if part]
    count = 3 if scheme == "hf" else 1
    if len(parts) < count or (scheme == "hf" and parts[0] != "datasets"):
        form = "hf://datasets/USER/REPO/path" if scheme == "hf" else f"{scheme}://BUCKET/path"
        raise InvalidValue("LS1013", f"{text}: expected {form}")
    if ".." in parts or "." in parts:
        raise InvalidValue("LS1014", f"{text}: an address cannot contain . or ..; write the full path")
    return Address(scheme, "/".join(parts[:count]), "/".join(parts[count:]))


def _of_mirror(text: str) -> str:
    """Check that a text is the address of a folder in a writable object store. Errors: `ValueError`."""
    if not is_address(text):
        raise InvalidValue(
            "LS1015", f"{text!r} is not an address; expected an address such as s3://bucket/runs/emotion"
        )
    address = address_of(text)
    if address.scheme not in STORES:
        raise InvalidValue(
            "LS1016",
            f"{address.scheme}:// can be read but not written; use one of "
            f"{', '.join(f'{s}://' for s in STORES)} (hub.push_to uploads the export to the Hub)",
        )
    if not address.path:
        raise InvalidValue(
            "LS1017", f"{text} names a whole bucket; name a folder in the bucket, such as {address}/runs/emotion"
        )
    return str(address)


Mirror = Annotated[str, AfterValidator(_of_mirror)]


def _path(text: str) -> str:
    """Check that a text can be a path or a name on the Hub. Errors: `ValueError`."""
    try:
        content = text.encode()
    except UnicodeError:
        raise InvalidValue(
            "LS1018", f"{text[:60]!r} is not valid UTF-8; rename the file, or correct the value"
        ) from None
    if b"\0" in content:
        raise InvalidValue("LS1019", f"{text[:60]!r} contains a zero byte, which a path cannot contain")
    if "://" not in text and (len(content) > 4000 or any(len(part) > 255 for part in content.split(b"/"))):
        raise InvalidValue(
            "LS1020", f"{text[:40]!r}... has {len(text):,} characters; a path or name cannot be that long"
        )
    return text


PathText = Annotated[str, AfterValidator(_path)]


Scalar = bool | int | float | str
Count = Annotated[int, Field(ge=0)]
_MAY_BE = "a value, a list of values, or a mapping with some of"


class Keys(BaseModel):
    """Base of models whose keys have defaults."""

    @property
    def changed_keys(self) -> list[str]:
        """Keys whose values are not their defaults."""
        fields = type(self).model_fields.items()
        return [k for k, f in fields if getattr(self, k) != f.get_default(call_default_factory=True)]


class Condition(BaseModel):
    """Row filter on one column: a row is used if its value meets all conditions that are set."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    min: int | float | None = Field(None, description="lower bound of a number")
    max: int | float | None = Field(None, description="upper bound of a number")
    none_of: list[Scalar] | None = Field(None, min_length=1, description="excluded values")
    min_characters: Count | None = Field(None, description="minimum number of characters of a text")
    max_characters: Count | None = Field(None, description="maximum number of characters of a text")
    min_words: Count | None = Field(None, description="minimum number of words of a text, or items of a list")
    max_words: Count | None = Field(None, description="maximum number of words of a text, or items of a list")
    min_tokens: Count | None = Field(None, description="minimum number of tokens of a text, by the run's tokenizer")
    max_tokens: Count | None = Field(None, description="maximum number of tokens of a text, by the run's tokenizer")

    @model_serializer(mode="wrap")
    def _what_is_given(self, write: Any) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if value is not None}

    @property
    def counts_tokens(self) -> bool:
        """Whether a condition needs a tokenizer."""
        return self.min_tokens is not None or self.max_tokens is not None

    @property
    def conditions(self) -> dict[str, Any]:
        """The conditions that are set, key -> value."""
        return self.model_dump()


def _explained(values: Any) -> Any:
    """Check the value of `data.filter`, with clearer messages than pydantic has for unions. Errors: `ValueError`."""
    if not isinstance(values, Mapping):
        raise InvalidValue(
            "LS1021", f"invalid value {values!r}; expected a mapping of columns to conditions, such as {{language: en}}"
        )
    allowed = f"{_MAY_BE} {', '.join(Condition.model_fields)}"
    for column, value in values.items():
        if isinstance(value, Condition):
            continue
        listed = value if isinstance(value, list) else [value]
        if isinstance(value, Mapping):
            _check(column, value, allowed)
        elif not listed or not all(isinstance(each, Scalar) for each in listed):
            raise InvalidValue("LS1022", f"{column}: {value!r} is not a condition; a condition is {allowed}")
    return values


def _check(column: Any, value: Mapping[str, Any], allowed: str) -> None:
    """Check the conditions on one column. Errors: `ValueError`."""
    try:
        conditions = Condition.model_validate(value).conditions
    except ValidationError as error:
        wrong = ".".join(str(part) for part in error.errors()[0]["loc"][:1])
        if wrong not in Condition.model_fields:
            raise InvalidValue("LS1023", f"{column}: unknown condition {wrong!r}; a condition is {allowed}") from None
        expected = {"none_of": "a list of values", "min": "a number", "max": "a number"}.get(wrong, "an integer")
        about = Condition.model_fields[wrong].description
        raise InvalidValue(
            "LS1024", f"{column}: {wrong}: invalid value {value[wrong]!r}; expected {expected}: {about}"
        ) from None
    if not conditions:
        raise InvalidValue("LS1025", f"{column}: the condition is empty; a condition is {allowed}")
    for what in ("", "_characters", "_words", "_tokens"):
        low, high = conditions.get(f"min{what}"), conditions.get(f"max{what}")
        if low is not None and high is not None and low > high:
            raise InvalidValue(
                "LS1026",
                f"{column}: min{what} ({low}) is more than max{what} ({high}): no row can match; exchange or "
                "correct the two values",
            )


Filter = Annotated[
    dict[str, Scalar | Annotated[list[Scalar], Field(min_length=1)] | Condition], BeforeValidator(_explained)
]


Weight = float | list[tuple[int, float]]
# Keys that each source of a mixture sets; with a single source, `data` itself has them.
_READING = ("layout", "columns", "separator", "quote", "encoding", "types", "filter", "split_column")
OWN = ("source", "config", "revision", "train", "validation", "test", *_READING)


class OneSource(Keys):
    """One source of a mixture. Its keys are those of `data`, plus `name`, `weight` and `rename`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^\w+$", description="its name in metrics; default: that of its file, folder or Hub id")
    weight: Weight | None = Field(
        None,
        description="share of a step's examples, relative to the other sources' weights; or a list of [step, "
        "weight], each valid from that step on; default: its number of examples",
    )
    rename: dict[str, str] = Field(
        default_factory=dict, description="the task's column -> its name in this source (also a dotted path)"
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
    types: Types | None = Field(None, description="as data.types")
    filter: Filter = Field(default_factory=dict, description="as data.filter")
    split_column: str | None = Field(None, description="as data.split_column")

    @property
    def own(self) -> dict[str, Any]:
        """The source's values of the keys that it shares with `data`."""
        return {key: getattr(self, key) for key in OWN}

    @property
    def schedule(self) -> list[tuple[int, float]]:
        """[(step, weight), ...], each valid from its step on; empty if the number of examples is the weight."""
        if self.weight is None:
            return []
        return list(self.weight) if isinstance(self.weight, list) else [(0, self.weight)]


def _explained_mixture(values: Any) -> Any:
    """Validate `data.sources`. Errors: `ValueError`, which names the source."""
    if not isinstance(values, list) or not values:
        raise InvalidValue(
            "LS1027",
            f"invalid value {values!r}; expected a list of sources, such as [{{source: web.jsonl, weight: 2}}]",
        )
    named_sources = [_named(value, place) for place, value in enumerate(values)]
    entries = [value if isinstance(value, OneSource) else _entry(value) for value in named_sources]
    names = Counter(entry.name for entry in entries)
    if (twice := names.most_common(1)[0])[1] > 1:
        raise InvalidValue("LS1028", f"two sources have the name {twice[0]}; give each source a different name")
    if "scale" in names:
        raise InvalidValue(
            "LS1029",
            "a source cannot have the name scale, because its loss would be logged as loss_scale, which is "
            "another metric; choose a different name",
        )
    without = [entry.name for entry in entries if entry.weight is None]
    if 0 < len(without) < len(entries):
        raise InvalidValue(
            "LS1030", f"{without[0]} has no weight but other sources have one; give a weight to every source or to none"
        )
    for entry in entries:
        _check_weight(entry)
    return entries


def _named(value: Any, place: int) -> Any:
    """Return a source as a mapping with a name, by default derived from its path."""
    if isinstance(value, OneSource):
        return value
    value = {"source": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise InvalidValue("LS1031", f"source {place + 1}: invalid value {value!r}; expected a mapping of keys")
    if value.get("name") is None:
        train = value.get("train")
        origin = str(value.get("source") or (train[0] if isinstance(train, list) and train else train) or "")
        name = re.sub(r"\W+", "_", Path(origin).name.split(".")[0]).strip("_")
        value = {**value, "name": name or f"source_{place + 1}"}
    return value


def _entry(value: Mapping[str, Any]) -> OneSource:
    """Validate one source. Errors: `ValueError`."""
    name = value["name"]
    try:
        entry = OneSource.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, OneSource.model_fields, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InvalidValue(
                "LS1032", f"{name}: unknown key {key!r}; {hint}known are {', '.join(OneSource.model_fields)}"
            ) from None
        if first["type"] == "value_error":
            cause = first["ctx"]["error"]
            raise InvalidValue(cause.code, f"{name}: {key}: {cause.message}") from None
        about = OneSource.model_fields[key].description
        raise InvalidValue("LS1034", f"{name}: {key}: invalid value {value.get(key)!r}; {about}") from None
    if entry.source is None and entry.train is None:
        raise InvalidValue(
            "LS1035", f"{name}: no data given; set source (a Hub id, a folder or a file) or train (files)"
        )
    return entry


def _check_weight(entry: OneSource) -> None:
    """Check the weight schedule of a source. Errors: `ValueError`."""
    for step, weight in entry.schedule:
        if not 0 < weight < float("inf"):
            raise InvalidValue(
                "LS1036",
                f"{entry.name}: weight: invalid value {weight:g}; expected a number > 0; to leave a source "
                "unused, remove it from data.sources",
            )
        if step < 0:
            raise InvalidValue("LS1037", f"{entry.name}: weight: invalid step {step}; expected a step >= 0")
    steps = [step for step, _ in entry.schedule]
    if entry.weight is not None and (not steps or steps[0] != 0 or steps != sorted(set(steps))):
        raise InvalidValue(
            "LS1038",
            f"{entry.name}: weight: invalid value {[list(point) for point in entry.schedule]}; expected [[0, weight], "
            "[step, weight], ...], steps in order, the first of them 0",
        )


Mixture = Annotated[list[OneSource], BeforeValidator(_explained_mixture)]


WINDOW = 8192
CACHE_GB = 20.0
_ALL_ROWS = "needs all rows of train at once"
# Keys of `data` that a stream does not support -> why. Keys at their defaults are ignored.
_REFUSED = {
    "layout": "a stream reads rows in .jsonl, .txt, .tar and .parquet files",
    "columns": "a stream reads no .csv or .tsv files, whose rows may span lines; write .jsonl or .parquet",
    "separator": "a stream reads no .csv or .tsv files; write .jsonl or .parquet",
    "quote": "a stream reads no .csv or .tsv files; write .jsonl or .parquet",
    "encoding": "a stream reads UTF-8 only",
    "split_column": f"it {_ALL_ROWS}; write validation and test to files of their own",
    "test_fraction": f"splitting it off {_ALL_ROWS}; name files in data.test",
    "validation_fraction": f"splitting it off {_ALL_ROWS}; name files in data.validation",
    "deduplicate": f"it {_ALL_ROWS}; remove duplicates when writing the shards",
    "limit": "name fewer shards in data.train",
    "group_by_length": "it sorts the examples of many steps, and a stream reads only the next ones",
}


class Streaming(Keys):
    """Keys of `data` about streaming."""

    stream: bool = Field(
        False,
        description="read and tokenize the shards of train during training, instead of caching all tokens first",
    )
    stream_window: Annotated[int, Field(ge=1)] = Field(
        WINDOW,
        description="size of the shuffle buffer of a stream, in examples, per source",
    )

    stream_cache_gb: Annotated[float, Field(gt=0)] = Field(
        CACHE_GB,
        description="gigabytes of cache for copies of remote shards, over all runs; does not change results",
    )

    @model_validator(mode="after")
    def _goes_with_a_stream(self) -> Any:
        if not self.stream:
            for key in [key for key in self.changed_keys if key in Streaming.model_fields]:
                raise InvalidValue(
                    "LS1039", f"{key} has an effect only with data.stream; set data.stream=true, or remove {key}"
                )
            return self
        for key in [key for key in _REFUSED if key in self.changed_keys]:
            raise InvalidValue("LS1040", f"{key} cannot be combined with data.stream: {_REFUSED[key]}")
        _check_filter(self, "")
        for entry in getattr(self, "sources", None) or []:
            for key in [key for key in _REFUSED if key in entry.changed_keys]:
                raise InvalidValue(
                    "LS1041", f"sources: {entry.name}: {key} cannot be combined with data.stream: {_REFUSED[key]}"
                )
            _check_filter(entry, f"sources: {entry.name}: ")
        return self


def _check_filter(section: Any, where: str) -> None:
    """Reject filters by tokens, which a stream cannot apply. Errors: `ValueError`."""
    for column, condition in getattr(section, "filter", {}).items():
        if isinstance(condition, Condition) and condition.counts_tokens:
            raise InvalidValue(
                "LS1042",
                f"{where}filter: {column}: the tokens of a stream cannot be counted before it is encoded; use "
                "min_words and max_words instead",
            )
