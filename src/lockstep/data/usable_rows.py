"""Select the usable rows of a split: nested columns, missing values, and `data.filter`.

In: a split and the columns that a task reads, by key of the run file. Out: the split with these columns, limited to
complete rows; or a `RunError` that says where values are missing, how often, and what to do. Columns are scanned in
parts, never loaded as a whole list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.config.data_sources import USUAL, Condition, Scalar
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import tokenizer, value_types
from lockstep.data.arrow_cache import VERSION, Columns, content, digest, encode
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from datasets import Dataset


ROWS = 10_000  # rows per part
_NEW = "read-by-parts"  # fingerprint of read-only copies: `datasets` would pickle and hash functions to compute one


def of_rows(faulty: Iterable[int], split: str, among: Sequence[int]) -> str:
    """Name the first faulty row of a split and count the others, of the rows `among` that were read."""
    first, *more = faulty
    if not more:
        return f"row {first} of {split}"
    others = f"{', '.join(map(str, more[:3]))}{', ...' if len(more) > 3 else ''}"
    return f"row {first} of {split} (and {len(more):,} more of rows {among[0]} to {among[-1]}: {others})"


def arrays(dataset: Dataset, column: str) -> Iterator[pa.ChunkedArray]:
    """Yield a column in parts, as Arrow arrays."""
    selected = dataset.select_columns([column], new_fingerprint=_NEW)
    selected.set_format("arrow")  # in place; `with_format` would copy
    for start in range(0, len(selected), ROWS):
        yield selected[start : start + ROWS].column(0)


def lists(dataset: Dataset, *columns: str) -> Iterator[tuple[int, list[Any]]]:
    """Yield parts of a column as Python values, or of several columns as tuples, each with the number of its first
    row."""
    selected = dataset.select_columns(list(dict.fromkeys(columns)), new_fingerprint=_NEW)
    selected.set_format(None)
    for start in range(0, len(selected), ROWS):
        part = selected[start : start + ROWS]
        one = [part[column] for column in columns]
        yield start, one[0] if len(one) == 1 else list(zip(*one, strict=True))


def numbers(dataset: Dataset, column: str) -> np.ndarray:
    """An integer column without nulls, in its Arrow dtype."""
    parts = [np.asarray(part.combine_chunks()) for part in arrays(dataset, column)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def plain(dataset: Dataset, column: str) -> bool:
    """Return whether a column holds integers or texts whose Arrow and Python values agree."""
    kind = dataset.features[column]
    dtype = str(getattr(kind, "dtype", None))
    return type(kind).__name__ in ("Value", "ClassLabel") and dtype.startswith(
        ("string", "large_string", "int", "uint")
    )


def distinct(dataset: Dataset, column: str) -> set[Any]:
    """Distinct values of a column."""
    values_seen: set[Any] = set()
    if plain(dataset, column):
        for part in arrays(dataset, column):
            values_seen.update(pc.unique(part).to_pylist())
    else:
        for _, values in lists(dataset, column):
            values_seen.update(values)
    return values_seen


def replaced(dataset: Dataset, column: str, convert: Callable[[list[Any]], list[Any]], dtype: str) -> Dataset:
    """Replace a column by the results of `convert`, applied to batches of values."""
    import datasets

    only = dataset.select_columns([column]).map(
        lambda rows: {column: convert(rows[column])},
        batched=True,
        batch_size=ROWS,
        features=datasets.Features({column: datasets.Value(dtype)}),
        load_from_cache_file=False,
    )
    return with_column(dataset, column, only)


def with_column(dataset: Dataset, column: str, only: Dataset) -> Dataset:
    """Replace a column by that of another data set."""
    import datasets

    others = [name for name in dataset.column_names if name != column]
    if not others:
        return only
    both = datasets.concatenate_datasets([dataset.select_columns(others), only], axis=1)
    return both.select_columns(dataset.column_names)


def added(dataset: Dataset, columns: Mapping[str, str], split: str, name: str) -> Dataset:
    """Add a column for each path in `columns` (key of the run file -> path) that leads into an existing column. Errors:
    `RunError`."""
    import datasets

    for key, path in columns.items():
        parted = _parted(dataset, path)
        if parted is None:
            continue
        root, parts = parted
        origin = _PathOrigin(key, path, split, name)
        if _leads_into_json(dataset.features[root], parts):
            dataset = datasets.concatenate_datasets([dataset, _of_json(dataset, root, parts, origin)], axis=1)
            continue
        feature = _feature(dataset, root, parts, origin)

        def reached(
            table: pa.Table, origin: _PathOrigin = origin, parts: tuple[str, ...] = parts, kind: Any = feature
        ) -> Any:
            column = _reach(pa.chunked_array(table.column(0).chunks).combine_chunks(), parts, origin)
            return pa.table({origin.path: column}, schema=datasets.Features({origin.path: kind}).arrow_schema)

        inner = dataset.select_columns([root]).with_format("arrow")
        only = inner.map(
            reached,
            batched=True,
            batch_size=ROWS,
            remove_columns=[root],
            features=datasets.Features({path: feature}),
            load_from_cache_file=False,
        )
        dataset = datasets.concatenate_datasets([dataset, only.with_format(None)], axis=1)
    return dataset


def values(dataset: Dataset, key: str, path: str, split: str, name: str) -> Iterator[pa.Array]:
    """Yield the values of a column or path in batches. Errors: `RunError`, also if there is no such column."""
    column_and_path = (path, ()) if path in dataset.column_names else _parted(dataset, path)
    if column_and_path is None:
        raise RunError(
            "LS2310",
            f"{key}: the {split} split of {name} has no column {path!r}; it has {', '.join(dataset.column_names)}",
        )
    root, parts = column_and_path
    origin = _PathOrigin(key, path, split, name)
    if _leads_into_json(dataset.features[root], parts):
        dataset, root, parts = _of_json(dataset, root, parts, origin), path, ()
    column = dataset.select_columns([root]).with_format("arrow")
    for start in range(0, len(dataset), ROWS):
        yield _reach(column[start : start + ROWS].column(0).combine_chunks(), parts, origin)


def _parted(dataset: Dataset, path: str) -> tuple[str, tuple[str, ...]] | None:
    """Split a path into its column (the longest matching name) and the remaining parts; None if the whole path is a
    column, or if no column matches."""
    if path in dataset.column_names:
        return None
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if (root := ".".join(parts[:count])) in dataset.column_names:
            return root, tuple(parts[count:])
    return None


def within(path: str, value: Any) -> str:
    """Suggest a path within a value that leads to a text, as the end of a message."""
    steps = [path]
    while isinstance(value, list | dict) and value:
        steps.append("0" if isinstance(value, list) else str(next(iter(value))))
        value = value[0] if isinstance(value, list) else value[steps[-1]]
    return f"; to name a value inside it, write {'.'.join(steps)}" if len(steps) > 1 and isinstance(value, str) else ""


@dataclass(frozen=True)
class _PathOrigin:
    """Origin of a path, for messages."""

    key: str
    path: str
    split: str
    name: str

    def wrong(self, parts: tuple[str, ...], why: str) -> RunError:
        """The error for a path. `parts`: the unresolved rest of the path."""
        before = self.path.removesuffix("." + ".".join(parts)) if parts else self.path
        return RunError("LS2311", f"{self.key}: {self.path}: {before!r} of the {self.split} split of {self.name} {why}")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _reach(column: pa.Array, parts: tuple[str, ...], origin: _PathOrigin) -> pa.Array:
    """Follow a path into an Arrow array. Errors: `RunError`."""
    for place, part in enumerate(parts):
        rest, kind = parts[place:], column.type
        if pa.types.is_struct(kind):
            names = [kind.field(i).name for i in range(kind.num_fields)]
            if part not in names:
                raise origin.wrong(rest, f"has no {part!r}; it has {', '.join(names)}")
            column = pc.struct_field(column, [names.index(part)])
        elif _is_list(kind):
            if not part.removeprefix("-").isdigit():
                within = ".".join([origin.path.removesuffix("." + ".".join(rest)), "0", *rest])
                raise origin.wrong(rest, f"holds lists: say which of their items, for example {within} (-1: the last)")
            column = _item(column, int(part))
        elif pa.types.is_null(kind):
            return column
        else:
            what = "values of different kinds" if isinstance(kind, pa.BaseExtensionType) else f"{kind}s"
            raise origin.wrong(rest, f"holds {what}, in which there is no {part!r}")
    return column


def _leads_into_json(feature: Any, parts: tuple[str, ...]) -> bool:
    """Whether a path leads into values that are stored as JSON: mappings of which some have more keys than others."""
    for part in parts:
        if type(feature).__name__ == "Json":
            return True
        feature = feature.get(part) if isinstance(feature, Mapping) else getattr(feature, "feature", None)
    return False


def _of_json(dataset: Dataset, root: str, parts: tuple[str, ...], origin: _PathOrigin) -> Dataset:
    """The values at a path, as a data set of one column; an absent key is null. Errors: `RunError`, also if no row has
    the key."""
    extracted: list[Any] = []
    furthest = 0  # parts of the path that lead somewhere in some row
    for first, column in lists(dataset, root):
        for row, value in enumerate(column, first):
            reached = 0
            for place, part in enumerate(parts):
                if value is None:
                    break
                if isinstance(value, list) and part.removeprefix("-").isdigit():
                    value = value[int(part)] if -len(value) <= int(part) < len(value) else None
                elif isinstance(value, dict) and part in value:
                    value = value[part]
                elif isinstance(value, dict):
                    value = None
                    break
                else:
                    raise origin.wrong(parts[place:], f"holds {repr(value)[:60]} in row {row}, which has no {part!r}")
                reached += 1
            furthest = max(furthest, reached)
            extracted.append(value)
    if furthest < len(parts):
        raise origin.wrong(parts[furthest:], f"has no {parts[furthest]!r} in any row")
    return value_types.dataset_of({origin.path: extracted})


def _item(lists: pa.Array, place: int) -> pa.Array:
    """Item of each list at an index, negative from the end; null if a list is too short."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = np.cumsum(lengths) - lengths  # offsets after `flatten`, which skips null lists
    there = lengths >= (place + 1 if place >= 0 else -place)
    at = starts + (place if place >= 0 else lengths + place)
    return pc.list_flatten(lists).take(pa.array(np.where(there, at, 0), mask=~there))


def _feature(dataset: Dataset, root: str, parts: Iterable[str], origin: _PathOrigin) -> Any:
    """The `datasets` type at a path; names of labels are kept."""
    from datasets.features.features import generate_from_arrow_type

    feature: Any = dataset.features[root]
    for part in parts:
        inner = getattr(feature, "feature", None)
        feature = feature.get(part) if isinstance(feature, dict) else inner
    if feature is None or isinstance(feature, dict):
        sample = dataset.select_columns([root]).with_format("arrow")[:1].column(0).combine_chunks()
        return generate_from_arrow_type(_reach(sample, tuple(parts), origin).type)
    return feature


class NothingLeft(RunError):
    """Every row is incomplete, and incomplete rows are dropped."""


def check_columns(dataset: Dataset, columns: Mapping[str, str], split: str, name: str) -> None:
    """Check that every column exists. Errors: `RunError`."""
    for key, column in columns.items():
        if column not in dataset.column_names:
            raise RunError(
                "LS2312",
                f"{key}: the {split} split of {name} has no column {column!r}; it has "
                f"{', '.join(dataset.column_names)}{_other_separator(dataset.column_names)}",
            )


def _other_separator(names: list[str]) -> str:
    """Suggest a separator for a table whose header was read as one cell."""
    marks = [mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]]
    name = {"\t": "tab"}.get(marks[0], marks[0]) if marks else ""
    return f". Cells seem to have {name!r} between them: set data.separator={name!r}" if marks else ""


def complete(dataset: Dataset, columns: Mapping[str, str], split: str, name: str, drop: bool) -> Dataset:
    """Rows with a value in every column: not null, not blank, not -1 with named labels. Errors: `RunError` if there are
    incomplete rows and `drop` is not set, or if no row is left."""
    return without(
        dataset, {key: (column, lacking(dataset, column)) for key, column in columns.items()}, split, name, drop
    )


def without(
    dataset: Dataset, lacks: Mapping[str, tuple[str, np.ndarray]], split: str, name: str, drop: bool
) -> Dataset:
    """Rows that are not marked in any of `lacks`: key -> (column, bool [rows]). Errors: as in `complete`."""
    lacks = {key: lack for key, lack in lacks.items() if lack[1].any()}
    if not lacks:
        return dataset
    if not drop:
        messages = [_describe(dataset, key, *lack, split, name) for key, lack in lacks.items()]
        raise RunError(
            "LS2323",
            "\n  ".join(["columns have missing values in some rows:", *messages] if len(messages) > 1 else messages),
        )
    complete_rows = np.flatnonzero(~np.logical_or.reduce([rows for _, rows in lacks.values()]))
    if len(complete_rows) == 0:
        columns = " and ".join(repr(column) for column, _ in lacks.values())
        raise NothingLeft(
            "LS2313", f"data.drop_missing: no row of the {split} split of {name} has a value in {columns}"
        )
    dataset = dataset.select(complete_rows)
    for column, _ in lacks.values():  # the remaining values of a mixed column may have one type
        if value_types.is_json(dataset.features[column]) and all(
            isinstance(value, str) for _, part in lists(dataset, column) for value in part
        ):
            dataset = replaced(dataset, column, list, "string")
    return dataset


def texts(dataset: Dataset, columns: Mapping[str, str], split: str, name: str, drop: bool) -> Dataset:
    """Rows whose columns all hold texts. Errors: `RunError` if a column is missing or holds other values, and as in
    `complete`."""
    check_columns(dataset, columns, split, name)
    dataset = complete(dataset, columns, split, name, drop)
    for key, column in columns.items():
        if getattr(dataset.features[column], "dtype", None) not in ("string", "large_string"):
            parts = lists(dataset, column)
            bad = next((first + i for first, part in parts for i, v in enumerate(part) if not isinstance(v, str)), None)
            if bad is not None:
                raise RunError(
                    "LS2314",
                    f"{key}: column {column!r} of the {split} split must hold texts; row {bad} holds "
                    f"{str(dataset[bad][column])[:80]}{within(column, dataset[bad][column])}",
                )
    return dataset


def left_out(read: Mapping[str, Dataset], used: Mapping[str, Dataset]) -> dict[str, Any]:
    """The fact `left_out`: number of removed rows per split (all rows of one with hidden labels); empty if none."""
    fewer = {split: len(rows) - len(used.get(split, ())) for split, rows in read.items()}
    counts = {split: count for split, count in fewer.items() if count}
    return {"left_out": counts} if counts else {}


def with_unusable(
    facts: dict[str, Any], usable: Mapping[str, Dataset], used: Mapping[str, Dataset], name: str
) -> dict[str, Any]:
    """Count rows of `usable` that are not in `used` separately from incomplete rows, in the facts. Errors: `RunError`
    if a split has no row left."""
    counts = {split: fewer for split, rows in usable.items() if (fewer := len(rows) - len(used[split]))}
    for split in counts:
        if not len(used[split]):
            raise RunError(
                "LS2405", f"data.drop_unusable: no row of the {split} split of {name} is left; correct the rows"
            )
    if not counts:
        return facts
    lacking = {split: count - counts.get(split, 0) for split, count in facts["left_out"].items()}
    rest = {key: value for key, value in facts.items() if key != "left_out"}
    rest |= {"left_out": some} if (some := {split: count for split, count in lacking.items() if count}) else {}
    return rest | {"unusable": counts}


def lacking(dataset: Dataset, column: str) -> np.ndarray:
    """Return whether each row lacks a value in a column: bool [rows]."""
    label_names = getattr(dataset.features[column], "names", None)
    if value_types.is_json(dataset.features[column]):  # values of several types: "" beside numbers, [] beside texts
        return empty(dataset, column)

    def has_nothing(values: pa.ChunkedArray) -> np.ndarray:
        mask = pc.is_null(values, nan_is_null=True)
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            mask = pc.or_(mask, pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), True))
        elif label_names:
            mask = pc.or_(mask, pc.fill_null(pc.equal(values, -1), True))
        return np.from_dlpack(mask.combine_chunks().cast(pa.uint8())).astype(bool)

    return np.concatenate([np.empty(0, bool), *map(has_nothing, arrays(dataset, column))])


def empty(dataset: Dataset, column: str) -> np.ndarray:
    """Return whether each row has a null, a blank text or an empty list in a column: bool [rows]."""
    parts = (np.array([is_nothing(value) for value in part], bool) for _, part in lists(dataset, column))
    return np.concatenate([np.empty(0, bool), *parts])


def is_nothing(value: Any) -> bool:
    """Return whether a value is null, NaN, blank or empty."""
    return value is None or value != value or value in ([], {}) or (isinstance(value, str) and not value.strip())


def _describe(dataset: Dataset, key: str, column: str, lacks: np.ndarray, split: str, name: str) -> str:
    first = int(np.flatnonzero(lacks)[0])
    return (
        f"{key}: column {column!r} of the {split} split of {name} must have a value in every row, but "
        f"{int(lacks.sum())} of {len(lacks)} rows have none (row {first} holds {repr(dataset[first][column])[:60]}): "
        "fill them in, or set data.drop_missing=true to leave such rows out"
    )


@dataclass(frozen=True)
class TokenCounts:
    """Token counts by the run's tokenizer. The caller holds the lock of its preparation."""

    choice: tokenizer.TokenizerChoice
    targets: frozenset[str] = frozenset()  # columns with a separate target tokenizer

    @classmethod
    def of(cls, choice: tokenizer.TokenizerChoice, targets: Iterable[str] = ()) -> TokenCounts:
        """`targets`: columns that the model learns to write, also as languages of the Hub's `translation` column."""
        return cls(choice, frozenset(name for target in targets for name in (target, f"translation.{target}")))

    def renamed(self, rename: Mapping[str, str]) -> TokenCounts:
        """Return a copy for a source that names the task's columns differently."""
        return replace(self, targets=frozenset(rename.get(target, target) for target in self.targets))

    def __call__(self, dataset: Dataset, path: str, split: str, name: str) -> np.ndarray:
        """Number of tokens of each row's text: int32 [rows], -1 for rows without text. Errors: `RunError`."""
        import datasets

        if self.choice.section.train is not None:
            raise RunError(
                "LS2315",
                f"data.filter: {path}: the tokenizer (tokenizer.train) is trained on the filtered texts, so it "
                "cannot count tokens for the filter; set tokenizer.source, or use min_words and max_words "
                "instead",
            )
        column = added(dataset, {"data.filter": path}, split, name).select_columns([path])
        dtype = getattr(column.features[path], "dtype", None)
        if dtype not in ("string", "large_string"):
            contents = f"{dtype} values" if dtype else "lists or mappings"
            raise RunError(
                "LS2316",
                f"data.filter: {path}: the {split} split of {name} holds {contents} in this column, and tokens can "
                "be counted in texts only",
            )
        is_target = path in self.targets
        target_tokenizer = tokenizer.of_targets(self.choice) if is_target else None
        folder = target_tokenizer or tokenizer.prepare(self.choice, iter(()), "")
        tok: Any = tokenizer.load(str(folder), self.choice.model.trust_remote_code)

        def encoder(rows: dict[str, list]) -> dict[str, list]:
            texts = [text or "" for text in rows[path]]
            tokenizer_input = {"text_target" if is_target else "text": texts}
            ids = tok(**tokenizer_input, return_attention_mask=False, verbose=False)["input_ids"]
            return {"tokens": [-1 if text is None else len(n) for text, n in zip(rows[path], ids, strict=True)]}

        key = digest("tokens of texts", VERSION, content(column, [path]), folder.name, is_target)
        features = datasets.Features({"tokens": datasets.Value("int32")})
        return np.asarray(Columns(encode(column, encoder, features, key)).flat("tokens"))


FilterValue = Scalar | list[Scalar] | Condition


# -- filter conditions -----------------------------------------------------------------------------------------------


def filtered(
    splits: dict[str, Dataset], data: DataSection, name: str, tokens: TokenCounts | None
) -> tuple[dict[str, Dataset], dict[str, int]]:
    """Rows that satisfy every condition of `data.filter`, and the number of removed rows per split. `tokens`: counts
    tokens, if there is a tokenizer. Errors: `RunError`, also if a split has no row left."""
    remaining, fewer = {}, {}
    for split, dataset in splits.items():
        masks, selected = holding(dataset, data, split, name, tokens)
        if len(dataset) and not selected.any():
            each = ", ".join(
                f"{_format_condition(data.filter[c])} of {c!r} in {mask.sum():,}" for c, mask in masks.items()
            )
            raise RunError(
                "LS2317", f"data.filter: no row of the {split} split of {name} is left of {len(dataset):,}: {each}"
            )
        fewer[split] = int(len(dataset) - selected.sum())
        remaining[split] = dataset.select(np.flatnonzero(selected)) if fewer[split] else dataset
    return remaining, {split: count for split, count in fewer.items() if count}


def holding(
    dataset: Dataset, data: DataSection, split: str, name: str, tokens: TokenCounts | None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Whether each row satisfies each condition of `data.filter`, by column, and whether it satisfies all: bool [rows].
    Errors: `RunError`."""
    masks = {c: _mask(dataset, c, condition, split, name, tokens) for c, condition in data.filter.items()}
    return masks, np.logical_and.reduce([np.ones(len(dataset), dtype=bool), *masks.values()])


def _format_condition(condition: FilterValue) -> str:
    if isinstance(condition, Condition):
        return "{" + ", ".join(f"{key}: {value}" for key, value in condition.conditions.items()) + "}"
    return repr(condition)


def _mask(
    dataset: Dataset, path: str, condition: FilterValue, split: str, name: str, tokens: TokenCounts | None
) -> np.ndarray:
    """Return whether each row satisfies a condition: bool [rows]; False for rows without a value."""
    names = getattr(dataset.features.get(path), "names", None)
    parts = [np.empty(0, dtype=bool)]
    for column in values(dataset, "data.filter", path, split, name):
        try:
            holds = _holds(_with_names(column, names), condition)
        except _Unlike as error:
            raise RunError("LS2318", f"data.filter: {path}: the {split} split of {name} holds {error}") from None
        parts.append(pc.fill_null(holds, False).to_numpy(zero_copy_only=False))
    mask = np.concatenate(parts)
    if not isinstance(condition, Condition) or not condition.counts_tokens or len(mask) == 0:
        return mask
    if tokens is None:
        raise RunError(
            "LS2319",
            f"data.filter: {path}: this task has no tokenizer that counts tokens; use min_words and max_words instead",
        )
    counts = tokens(dataset, path, split, name)
    least, most = condition.min_tokens or 0, np.inf if condition.max_tokens is None else condition.max_tokens
    return mask & (counts >= least) & (counts <= most)


class _Unlike(ValueError):
    """A condition does not apply to a column's type."""


def _with_names(column: pa.Array, names: list[str] | None) -> pa.Array:
    """Replace label codes by their names."""
    if names is None:
        return column
    return pa.array(names).take(pc.if_else(pc.greater_equal(column, 0), column, pa.scalar(None, column.type)))


def _holds(column: pa.Array, condition: FilterValue) -> pa.Array:
    """Evaluate a condition: bool [rows], null where the column is. Errors: `_Unlike`."""
    if not isinstance(condition, Condition):
        return _among(column, condition if isinstance(condition, list) else [condition])
    masks = [pc.is_valid(column)]
    for key, value in condition.conditions.items():
        if key.endswith("_tokens"):
            continue  # evaluated for all rows by `_mask`
        if key == "none_of":
            masks.append(pc.invert(_among(column, value)))
        else:
            measured = _measured(column, key.partition("_")[2])
            try:
                if pa.types.is_float32(measured.type):  # 0.7 differs in float32
                    value = pa.scalar(value, pa.float32())
                masks.append((pc.greater_equal if key.startswith("min") else pc.less_equal)(measured, value))
            except pa.ArrowException as error:  # integers beyond 2**53 and a decimal; float16
                raise _Unlike(f"{measured.type} there: {error}") from None
    return reduce(pc.and_, masks)


def _among(column: pa.Array, values: list[Scalar]) -> pa.Array:
    kind = column.type
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.bool_())
    for value in values:
        value_kind = {bool: "true or false", str: "a text"}.get(type(value), "a number")
        if value_kind != _kind(kind):
            quoted = ": put it between quotes" if _kind(kind) == "a text" else ""
            raise _Unlike(f"{_several(kind)} there, and {value!r} is {value_kind}{quoted}")
    try:
        if any(isinstance(value, float) for value in values) and not pa.types.is_float32(kind):
            column = column.cast(pa.float64())
        is_member = pc.is_in(column, value_set=pa.array(values).cast(column.type))
    except pa.ArrowException as error:  # a number beyond the column's type, or beyond 2**53 among decimals
        raise _Unlike(f"{kind} there: {error}") from None
    return pc.if_else(pc.is_null(column), pa.scalar(None, pa.bool_()), is_member)


def _measured(column: pa.Array, what: str) -> pa.Array:
    """Numbers unchanged, or lengths of texts and lists; null for missing values."""
    kind = column.type
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.int64())
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if what == "words" and listed:
        return pc.list_value_length(column)
    if (_kind(kind) == "a text") != bool(what) or _kind(kind) not in ("a text", "a number"):
        fits = {"": "min and max are for numbers", "words": "words are counted in texts and lists"}
        raise _Unlike(f"{_several(kind)} there; {fits.get(what, 'characters are counted in texts')}")
    if what == "words":
        trimmed = pc.utf8_trim_whitespace(column)
        counts = pc.list_value_length(pc.utf8_split_whitespace(trimmed))
        return pc.if_else(pc.equal(trimmed, ""), pa.scalar(0, counts.type), counts)
    return pc.utf8_length(column) if what else column


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "true or false"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "a text"
    return "a number" if pa.types.is_integer(kind) or pa.types.is_floating(kind) else str(kind)


def _several(kind: pa.DataType) -> str:
    return {"true or false": "true and false", "a text": "texts", "a number": "numbers"}.get(_kind(kind), str(kind))


# -- split column ----------------------------------------------------------------------------------------------------


def by_split_column(splits: dict[str, Dataset], data: DataSection, name: str) -> dict[str, Dataset]:
    """Split rows by `data.split_column`. Errors: `RunError`."""
    assert data.split_column is not None
    if list(splits) != ["train"]:
        raise RunError(
            "LS2320",
            f"data.split_column: {name} has {' and '.join(splits)} splits already; give all rows in "
            "data.source or data.train alone, or remove data.split_column",
        )
    train, column = splits["train"], data.split_column
    names = getattr(train.features.get(column), "names", None)
    split_names = {word: split for split, words in USUAL.items() for word in words}
    order, others, first = list(USUAL), Counter[Any](), None
    places = [np.empty(0, dtype=np.int8)]  # index of each row's split in `order`
    there: list[Any] = []  # known values
    for part in values(train, "data.split_column", column, "train", name):
        in_part = _with_names(part, names).to_pylist()
        to = {value: split_names.get(str(value).strip().lower()) for value in set(in_part)}
        there += sorted({str(value) for value in to if to[value]} - set(there))
        unknown = [row for row, value in enumerate(in_part) if to[value] is None]
        if unknown and first is None:
            first = sum(map(len, places)) + unknown[0], in_part[unknown[0]]
        others.update(in_part[row] for row in unknown)
        places.append(np.array([order.index(to[v] or "train") for v in in_part], dtype=np.int8))
    if first is not None:
        raise RunError(
            "LS2321",
            f"data.split_column: column {column!r} of {name} holds {first[1]!r} in "
            f"{quantity(others[first[1]], 'row')}, "
            f"first in row {first[0]:,}; expected one of {', '.join(split_names)}. To exclude other rows, "
            f"set data.filter: {{{column}: [{', '.join(there) or 'train'}]}}",
        )
    split_of = np.concatenate(places)
    rows_of = {split: np.flatnonzero(split_of == place) for place, split in enumerate(order)}
    if len(rows_of["train"]) == 0:
        raise RunError(
            "LS2322", f"data.split_column: no row of {name} has train in column {column!r}; mark the rows to train on"
        )
    return {split: train.select(rows) for split, rows in rows_of.items() if len(rows)}
