"""Assumptions about datasets, pyarrow and numpy: rows, shards, streams, fingerprints, files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from support.assumed import rests_on_it


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    import datasets

    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def rows(count: int = 6) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"x": list(range(count))})


@rests_on_it(
    "src/lockstep/data/usable_rows.py",
    "src/lockstep/data/arrow_cache.py",
    "src/lockstep/data/conversations.py",
    "src/lockstep/data/hub_rows.py",
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/data/raw_rows.py",
    "src/lockstep/data/row_files.py",
    "src/lockstep/data/source.py",
    "src/lockstep/data/splitting.py",
    "src/lockstep/data/text_pairs.py",
    "src/lockstep/data/token_checks.py",
    "src/lockstep/tasks/image_classification.py",
    "src/lockstep/tasks/language_modeling.py",
    "src/lockstep/tasks/masked_language_modeling.py",
    "src/lockstep/tasks/text_task.py",
    "src/lockstep/tasks/translation.py",
)
def test_selecting_columns_with_a_fingerprint_hashes_nothing() -> None:
    """select_columns stores the new_fingerprint passed to it without hashing, and keeps rows and their order."""
    selected = rows().select_columns(["x"], new_fingerprint="given")
    assert selected._fingerprint == "given"
    assert selected[:]["x"] == list(range(6))


@rests_on_it("src/lockstep/data/usable_rows.py")
def test_the_arrow_format_returns_tables() -> None:
    """In the format arrow, a slice of a data set is a pyarrow table in row order, also after a selection."""
    selected = rows().select([4, 0, 2])
    selected.set_format("arrow")
    part = selected[:2]
    assert isinstance(part, pa.Table)
    assert part.column(0).to_pylist() == [4, 0]


@rests_on_it("src/lockstep/data/prepare.py", "src/lockstep/data/splitting.py")
def test_concatenated_rows_are_in_order() -> None:
    """concatenate_datasets appends rows in order, and refuses columns of one name whose types differ."""
    from datasets import Dataset, concatenate_datasets

    joined = concatenate_datasets([rows(2), rows(3)])
    assert joined[:]["x"] == [0, 1, 0, 1, 2]
    with pytest.raises(ValueError, match="align"):
        concatenate_datasets([rows(2), Dataset.from_dict({"x": ["a"]})])


@rests_on_it("src/lockstep/data/column_types.py", "src/lockstep/data/annotated.py")
def test_a_column_with_a_float_becomes_floats() -> None:
    """from_dict converts a column of integers and floats to floats."""
    from datasets import Dataset

    made = Dataset.from_dict({"x": [1, 2.5]})
    assert made.features["x"].dtype == "float64"
    assert made[:]["x"] == [1.0, 2.5]


@rests_on_it("src/lockstep/data/column_types.py")
def test_declared_features_refuse_other_types() -> None:
    """from_dict with features raises for a string where an integer is declared, and for an integer that overflows its
    type."""
    from datasets import Dataset, Features, Value

    for value in ("text", 300):
        with pytest.raises((pa.ArrowInvalid, ValueError, OverflowError, TypeError)):
            Dataset.from_dict({"x": [value]}, features=Features({"x": Value("int8")}))


@rests_on_it("src/lockstep/data/labels.py")
def test_class_label_columns() -> None:
    """A ClassLabel column holds integers that index its names, and None for a missing label."""
    from datasets import ClassLabel, Dataset, Features

    made = Dataset.from_dict({"y": [1, 0, None]}, features=Features({"y": ClassLabel(names=["no", "yes"])}))
    assert made[:]["y"] == [1, 0, None]
    assert made.features["y"].names == ["no", "yes"]


@rests_on_it("src/lockstep/data/labels.py")
def test_class_labels_become_their_numbers() -> None:
    """cast_column from ClassLabel to int64 keeps the numbers."""
    from datasets import ClassLabel, Dataset, Features, Value

    made = Dataset.from_dict({"y": [1, 0]}, features=Features({"y": ClassLabel(names=["no", "yes"])}))
    assert made.cast_column("y", Value("int64"))[:]["y"] == [1, 0]


@rests_on_it("src/lockstep/lab/import_config/dataset_calls.py")
def test_an_unshuffled_split_takes_the_last_rows_for_test() -> None:
    """train_test_split without shuffling takes the test rows from the end; with a seed it is deterministic."""
    parts = rows(10).train_test_split(test_size=0.3, shuffle=False)
    assert (parts["train"][:]["x"], parts["test"][:]["x"]) == (list(range(7)), [7, 8, 9])
    first, second = (rows(10).train_test_split(test_size=0.3, seed=1)["test"][:]["x"] for _ in range(2))
    assert first == second


@rests_on_it("src/lockstep/data/arrow_cache.py", "src/lockstep/data/prepare.py", "src/lockstep/data/row_files.py")
def test_an_arrow_file_is_mapped_with_its_rows(tmp_path: Path) -> None:
    """Dataset.from_file memory-maps an Arrow stream file, keeps its types, and makes no copy."""
    from datasets import Dataset

    table = pa.table({"x": pa.array(range(100_000), pa.int32())})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    before = pa.total_allocated_bytes()
    read = Dataset.from_file(str(tmp_path / "a.arrow"))
    read.set_format("arrow")
    column = read[:].column(0)
    assert pa.total_allocated_bytes() - before < 100_000  # of 400,000 bytes
    assert column.to_pylist() == list(range(100_000))
    assert read.features["x"].dtype == "int32"


@rests_on_it("src/lockstep/data/arrow_cache.py")
def test_a_truncated_arrow_file_raises(tmp_path: Path) -> None:
    """Reading an Arrow stream file that ends in the middle of a batch raises."""
    table = pa.table({"x": list(range(1000))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    whole = sink.getvalue().to_pybytes()
    (tmp_path / "cut.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises((pa.ArrowInvalid, OSError)), pa.memory_map(str(tmp_path / "cut.arrow")) as source:
        pa.ipc.open_stream(source).read_all()


@rests_on_it(
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/data/usable_rows.py",
    "src/lockstep/data/order.py",
    "src/lockstep/data/text_pairs.py",
    "src/lockstep/tasks/image_classification.py",
    "src/lockstep/tasks/models/token_rows.py",
    "src/lockstep/tasks/modules/loss_probe.py",
    "src/lockstep/tasks/objectives/objective.py",
    "src/lockstep/tasks/own_metrics.py",
    "src/lockstep/tasks/preference.py",
    "src/lockstep/tasks/text_task.py",
)
def test_arrow_integers_are_read_without_a_copy() -> None:
    """np.asarray of a pyarrow integer array without nulls shares its memory; that of a boolean array copies."""
    array = pa.array([1, 2, 3], pa.int64())
    assert np.asarray(array).ctypes.data == array.buffers()[1].address
    with pytest.raises(pa.ArrowInvalid):
        pa.array([True, False]).to_numpy(zero_copy_only=True)


@rests_on_it("src/lockstep/data/arrow_cache.py", "src/lockstep/data/usable_rows.py")
def test_a_slice_of_an_arrow_array_shares_its_buffers() -> None:
    """A slice of a pyarrow array keeps the whole buffer and an offset, so a slice's buffer is larger than the slice."""
    part = pa.array(range(10), pa.int64()).slice(4, 2)
    assert (part.offset, part.buffers()[1].size) == (4, 80)
    assert part.to_pylist() == [4, 5]


@rests_on_it("src/lockstep/data/arrow_cache.py")
def test_ipc_bytes_of_slices_and_copies() -> None:
    """The IPC stream of a slice also contains some data behind the slice, so it differs from the stream of equal
    values. concat_tables of two parts (the second may be empty) and combine_chunks copy, and then the bytes are equal:
    for integers, strings, lists, structs and nulls."""

    def written(table: pa.Table) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return bytes(sink.getvalue())

    def copied(table: pa.Table) -> pa.Table:
        return pa.concat_tables([table[:1], table[1:]]).combine_chunks()

    for values in ([1, None, 3, 4], ["a", None, "bb", "c"], [[1], None, [2, 3], [4]], [{"a": "x"}, {"a": None}] * 2):
        for count in (1, 3):
            fresh, longer = pa.table({"x": values[:count]}), pa.table({"x": [values[-1], *values]})
            part = longer[1 : count + 1]
            pieces = pa.concat_tables([fresh[:1], fresh[1:]])
            assert {written(copied(each)) for each in (part, pieces, fresh)} == {written(fresh)}
    whole = pa.table({"x": [1, 2, 3, 4]})
    assert written(whole[:3].combine_chunks()) != written(pa.table({"x": [1, 2, 3]}))


@rests_on_it(
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/data/batch.py",
    "src/lockstep/data/host_facts.py",
    "src/lockstep/data/stream.py",
)
def test_list_columns_are_one_flat_array_with_offsets() -> None:
    """For a slice of a pyarrow list array, flatten() returns the slice's values, and .values the values of all rows."""
    lists = pa.array([[1, 2], [3], [4, 5, 6]])
    part = lists.slice(1, 2)
    assert part.flatten().to_pylist() == [3, 4, 5, 6]
    assert part.values.to_pylist() == [1, 2, 3, 4, 5, 6]


@rests_on_it(
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/plain/rows.py",
    "src/lockstep/plain/module.py",
    "src/lockstep/tasks/image_classification.py",
    "src/lockstep/tasks/modules/dataset.py",
    "src/lockstep/tasks/objectives/one_label.py",
)
def test_a_permutation_is_the_same_everywhere() -> None:
    """numpy's default_rng gives the same permutation for a seed in every version."""
    assert np.random.default_rng(7).permutation(6).tolist() == [5, 2, 0, 4, 1, 3]


@rests_on_it("src/lockstep/data/order.py", "src/lockstep/distributed/randomness.py")
def test_unsigned_integers_wrap_around() -> None:
    """numpy's uint64 arrays wrap around at 2**64 without a warning."""
    with np.errstate(all="raise"):
        assert (np.array([2**64 - 1], np.uint64) + np.uint64(2)).tolist() == [1]
        assert (np.array([2**63], np.uint64) * np.uint64(2)).tolist() == [0]


@rests_on_it("src/lockstep/data/order.py")
def test_a_stable_argsort_keeps_ties_in_order() -> None:
    """np.argsort(kind="stable") keeps equal keys in their original order."""
    keys = np.array([1, 0, 1, 0, 1] * 20)
    order = np.argsort(keys, kind="stable")
    assert order.tolist() == sorted(range(100), key=lambda i: (keys[i], i))


@rests_on_it("src/lockstep/data/source.py", "src/lockstep/data/conversations.py", "src/lockstep/data/usable_rows.py")
def test_map_ignores_changes_in_imported_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """map of a data set on disk returns its cached result even if a helper function in another module has changed
    since. load_from_cache_file=False computes it again."""
    import datasets

    (tmp_path / "rows.jsonl").write_text('{"a": "x"}\n')
    rows = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    # the two versions differ in length: Python detects a changed module by modification time (in seconds) and size
    seen = []
    for ending, options in (("old", {}), ("newer", {}), ("newer", {"load_from_cache_file": False})):
        (tmp_path / "mapped_helper.py").write_text(f"def ended(text): return text + '-{ending}'\n")
        monkeypatch.delitem(sys.modules, "mapped_helper", raising=False)
        helper = importlib.import_module("mapped_helper")
        seen += rows.map(lambda row, helper=helper: {"a": helper.ended(row["a"])}, **options)["a"][:]
    assert seen == ["x-old", "x-old", "x-newer"]


@rests_on_it("src/lockstep/data/value_types.py", "src/lockstep/data/column_types.py")
def test_columns_of_json_lose_digits() -> None:
    """datasets reads JSON columns with pandas' ujson_loads, which keeps about 15 digits and turns NaN into None, and
    writes 10 digits with ujson_dumps. lockstep replaces both names in datasets' modules features and json by Python's
    functions."""
    from datasets.features import features
    from datasets.utils import json as functions
    from pandas.io.json import ujson_dumps, ujson_loads

    assert ujson_loads("0.3333333333333333") != 1 / 3
    assert ujson_loads("NaN") is None
    assert ujson_dumps(1 / 3) == "0.3333333333"
    for name in ("ujson_dumps", "ujson_loads"):
        assert callable(getattr(features, name))
        assert callable(getattr(functions, name))


@rests_on_it("src/lockstep/data/value_types.py", "src/lockstep/data/conversations.py")
def test_a_json_column_keeps_strings() -> None:
    """A JSON column returns the value of the JSON text that it stores: a quoted "01" stays a string."""
    from datasets import Dataset, Features, Json
    from datasets.table import InMemoryTable, table_cast

    features = Features({"x": Json()})
    table = table_cast(pa.table({"x": ['"01"', "1", "[1, null]", "null", None]}), features.arrow_schema)
    assert Dataset(InMemoryTable(table)).with_format(None).features == features
    assert Dataset(InMemoryTable(table))[:]["x"] == ["01", 1, [1, None], None, None]


@rests_on_it("src/lockstep/data/usable_rows.py")
def test_arrow_and_python_agree_on_white_space() -> None:
    """pyarrow's utf8_trim_whitespace and utf8_split_whitespace agree with str.strip and str.split on all characters up
    to U+3100, such as U+001C, U+0085 and U+3000. utf8_length counts code points."""
    characters = [chr(number) for number in range(0x3100)]
    column = pa.array(characters)
    trimmed = pc.equal(pc.utf8_trim_whitespace(column), "").to_pylist()
    assert trimmed == [character.strip() == "" for character in characters]
    inside = pc.list_value_length(pc.utf8_split_whitespace(pa.array([f"a{each}b" for each in characters]))).to_pylist()
    assert inside == [len(f"a{each}b".split()) for each in characters]
    assert pc.utf8_length(pa.array(["é\U0001f600"])).to_pylist() == [2]


@rests_on_it("src/lockstep/data/usable_rows.py")
def test_null_in_sets_and_conjunctions() -> None:
    """pyarrow's is_in is False, not null, for null. `and_` of null and False is null. `unique` keeps one null.
    list_flatten skips the values that a null list in a slice points to."""
    column = pa.array([1, None, 2, None])
    assert pc.is_in(column, value_set=pa.array([1])).to_pylist() == [True, False, False, False]
    assert pc.and_(pa.array([None, None]).cast(pa.bool_()), pa.array([False, True])).to_pylist() == [None, None]
    assert pc.unique(column).to_pylist() == [1, None, 2]
    lists = pa.ListArray.from_arrays(
        pa.array([0, 2, 3, 5]), pa.array([1, 2, 3, 4, 5]), mask=pa.array([False, True, False])
    )
    assert pc.list_flatten(lists[1:]).to_pylist() == [4, 5]
    assert pc.list_value_length(lists).to_pylist() == [2, None, 2]


@rests_on_it("src/lockstep/data/labels.py", "src/lockstep/data/splitting.py", "src/lockstep/tasks/models/retrieval.py")
def test_boolean_strings_lexsort_and_unique() -> None:
    """datasets casts booleans to the strings "true" and "false", and null to null. np.lexsort sorts by its last key
    first, and keeps equal rows in order. np.unique returns the first index of each value."""
    import datasets

    rows = datasets.Dataset.from_dict({"a": [True, False, None]}).cast_column("a", datasets.Value("string"))
    assert rows["a"][:] == ["true", "false", None]
    pairs = np.array([[2, 1], [1, 3], [2, 1], [1, 2], [1, 3]])
    assert np.lexsort((pairs[:, 1], pairs[:, 0])).tolist() == [3, 1, 4, 0, 2]
    assert np.unique(np.array([5, 3, 5, 3]), return_index=True)[1].tolist() == [1, 0]


@rests_on_it("src/lockstep/data/hub_rows.py", "src/lockstep/data/row_files.py")
def test_datasets_readers_change_strings(tmp_path: Path) -> None:
    """load_dataset turns JSON strings that look like ISO dates into timestamps, and table cells "NA", "None" and "null"
    into None and "01" into 1. It ends lines of text only at "\n", "\r" and "\r\n"."""
    import datasets

    contents = {
        "json": '{"a": "2024-01-01", "b": "01"}\n{"a": "2024-01-02", "b": "02"}\n',
        "csv": "a,b,c\nNA,01,x\nNone,02,null\n",
        "text": "a\u2028b\nc\x0cd\r\ne\x85f\rg\x1ch\n\ni",
    }
    read = {}
    for kind, content in contents.items():
        (tmp_path / kind).write_bytes(content.encode())
        files, cache = str(tmp_path / kind), str(tmp_path / "cache")
        read[kind] = datasets.load_dataset(kind, data_files=files, split="train", cache_dir=cache)
    assert read["json"].features["a"].dtype == "timestamp[s]"
    assert read["json"]["b"][:] == ["01", "02"]
    assert read["csv"][:] == {"a": [None, None], "b": [1, 2], "c": ["x", None]}
    assert read["text"]["text"][:] == ["a\u2028b", "c\x0cd", "e\x85f", "g\x1ch", "", "i"]


@rests_on_it(
    "src/lockstep/data/usable_rows.py",
    "src/lockstep/data/row_files.py",
    "src/lockstep/tasks/image_classification.py",
    "src/lockstep/data/conversations.py",
)
def test_concatenating_columns() -> None:
    """concatenate_datasets with axis=1 puts columns side by side, of selected rows too, and raises for unequal numbers
    of rows and for equal names. select_columns orders columns by its argument."""
    from datasets import Dataset, concatenate_datasets

    left = Dataset.from_dict({"x": [1, 2, 3], "y": ["a", "b", "c"]})
    both = concatenate_datasets([left.select([2, 0]).select_columns(["x"]), Dataset.from_dict({"z": [7, 8]})], axis=1)
    assert both[:] == {"x": [3, 1], "z": [7, 8]}
    for other in ({"z": [7]}, {"x": [7, 8, 9]}):
        with pytest.raises(ValueError):
            concatenate_datasets([left, Dataset.from_dict(other)], axis=1)
    assert left.select_columns(["y", "x"]).column_names == ["y", "x"]


@rests_on_it(
    "src/lockstep/data/source.py",
    "src/lockstep/tasks/translation.py",
    "src/lockstep/data/row_files.py",
    "src/lockstep/data/stream.py",
    "src/lockstep/data/text_pairs.py",
    "src/lockstep/lab/init/columns.py",
    "src/lockstep/tasks/answer_pairs.py",
    "src/lockstep/tasks/image_classification.py",
)
def test_renaming_and_adding_columns() -> None:
    """rename_columns can exchange two names. A new name equal to that of another column gives two columns of one name,
    without an error. add_column to selected rows takes a list, a numpy array, a list of None (type null), or a feature,
    and raises for a wrong number of rows. Removing a missing column raises."""
    from datasets import Dataset, Value

    made = Dataset.from_dict({"x": [1, 2, 3], "y": ["a", "b", "c"]})
    assert made.rename_columns({"x": "y", "y": "x"})[:] == {"y": [1, 2, 3], "x": ["a", "b", "c"]}
    assert made.rename_columns({"x": "y"}).column_names == ["y", "y"]
    some = made.select([2, 0])
    assert some.add_column("n", [[1], [2]])[:]["n"] == [[1], [2]]
    assert some.add_column("n", np.full(2, 7, np.int8)).features["n"] == Value("int8")
    assert some.add_column("n", [None, None]).features["n"] == Value("null")
    assert some.add_column("n", ["a", None], feature=Value("string")).features["n"] == Value("string")
    for wrong in (lambda: made.add_column("n", [1]), lambda: made.remove_columns(["q"])):
        with pytest.raises(ValueError):
            wrong()


@rests_on_it(
    "src/lockstep/data/row_files.py", "src/lockstep/data/labels.py", "src/lockstep/tasks/image_classification.py"
)
def test_casts_keep_numbers_or_raise() -> None:
    """cast raises ArrowInvalid for integers out of range, fractions as integers, and integers beyond 2**53 as floats.
    Nulls and empty lists can be cast to every type. A struct's missing fields become null. cast_column keeps whole
    floats as int64; 1.0 as a string becomes "1"."""
    from datasets import Dataset, Features, List, Value

    for value, kind in ((300, "int8"), (1.5, "int64"), (2**53 + 1, "float64")):
        with pytest.raises(pa.ArrowInvalid):
            Dataset.from_dict({"x": [value]}).cast(Features({"x": Value(kind)}))
    assert Dataset.from_dict({"x": [None]}).cast(Features({"x": Value("string")}))[:] == {"x": [None]}
    assert Dataset.from_dict({"x": [[]]}).cast(Features({"x": List(Value("string"))}))[:] == {"x": [[]]}
    wider = Dataset.from_dict({"x": [{"a": 1}]}).cast(Features({"x": {"a": Value("int64"), "b": Value("string")}}))
    assert wider[:] == {"x": [{"a": 1, "b": None}]}
    numbers = Dataset.from_dict({"x": [1.0, -2.0]})
    assert numbers.cast_column("x", Value("int64"))[:] == {"x": [1, -2]}
    assert numbers.cast_column("x", Value("string"))[:] == {"x": ["1", "-2"]}


@rests_on_it("src/lockstep/data/usable_rows.py", "src/lockstep/data/conversations.py")
def test_mapping_arrow_tables() -> None:
    """map of a data set in the format arrow calls its function with tables of batch_size rows in order, uses the
    returned table, and stores the features passed to it. The result has the data set's format. A returned batch of
    another type is cast, or raises."""
    from datasets import Dataset, Features, Value

    features, sizes = Features({"z": Value("int64")}), list[int]()

    def tripled(table: pa.Table) -> pa.Table:
        sizes.append(len(table))
        return pa.table({"z": pc.multiply(table["x"], 3)}, schema=features.arrow_schema)

    options: Any = {"batched": True, "batch_size": 2, "load_from_cache_file": False}
    inner = Dataset.from_dict({"x": [1, 2, 3]}).with_format("arrow")
    made = inner.map(tripled, remove_columns=["x"], features=features, **options)
    assert (made.format["type"], made.features, sizes) == ("arrow", features, [2, 1])
    assert made.with_format(None)[:] == {"z": [3, 6, 9]}
    for values, kind in ((["1"], "int32"), (["a"], None)):
        rows = Dataset.from_dict({"z": [0]})
        if kind is None:
            with pytest.raises(pa.ArrowInvalid):
                rows.map(lambda _, values=values: {"z": values}, features=features, **options)
        else:
            mapped = rows.map(lambda _, values=values: {"z": values}, features=Features({"z": Value(kind)}), **options)
            assert mapped[:] == {"z": [1]}


@rests_on_it("src/lockstep/data/row_files.py")
def test_arrow_writer_and_cached_files(tmp_path: Path) -> None:
    """ArrowWriter.write_table appends tables. After finalize, Dataset.from_file has the features, class names and JSON
    columns included. load_dataset returns cached rows for a file that was replaced within the same modification time,
    and reads it again under another configuration name."""
    import os

    import datasets
    from datasets.arrow_writer import ArrowWriter
    from datasets.table import table_cast

    features = datasets.Features({"x": datasets.Json(), "c": datasets.ClassLabel(names=["a", "b"])})
    with ArrowWriter(features=features, path=str(tmp_path / "a.arrow")) as writer:
        for text in ('{"k": 1}', "2"):
            writer.write_table(table_cast(pa.table({"x": [text], "c": [None]}), features.arrow_schema))
        writer.finalize()
    read = datasets.Dataset.from_file(str(tmp_path / "a.arrow"))
    assert (read.features, read[:]) == (features, {"x": [{"k": 1}, 2], "c": [None, None]})
    rows = []
    for name, number in (("one", 1), ("one", 2), ("two", 2)):
        (tmp_path / "a.csv").write_text(f"a\n{number}\n")
        os.utime(tmp_path / "a.csv", ns=(10**18, 10**18))
        options: Any = {"data_files": [str(tmp_path / "a.csv")], "cache_dir": str(tmp_path / "cache")}
        rows.append(datasets.load_dataset("csv", name, split="train", **options)["a"][0])
    assert rows == [1, 1, 2]


@rests_on_it("src/lockstep/data/row_files.py", "src/lockstep/data/hub_rows.py", "src/lockstep/plain/rows.py")
def test_errors_for_files_without_rows(tmp_path: Path) -> None:
    """load_dataset of a table that has only a header raises with "corresponds to no data"; of an empty table, with the
    reader's error as the cause."""
    import datasets

    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "b.csv").touch()

    def loaded(name: str) -> Any:
        files, cache = [str(tmp_path / name)], str(tmp_path / "cache")
        return datasets.load_dataset("csv", data_files=files, split="train", cache_dir=cache)

    with pytest.raises(ValueError, match="corresponds to no data"):
        loaded("a.csv")
    with pytest.raises(Exception) as caught:
        loaded("b.csv")
    assert caught.value.__cause__ is not None


@rests_on_it(
    "src/lockstep/data/labels.py",
    "src/lockstep/data/source.py",
    "src/lockstep/data/annotated.py",
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/data/row_files.py",
)
def test_class_labels_from_strings_and_columns_of_from_list() -> None:
    """from_dict of strings for a ClassLabel stores their integers, and raises for an integer out of range; duplicate
    class names raise. from_list takes its columns from the first row, so lockstep passes features and complete rows."""
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"y": ClassLabel(names=["no", "yes"])})
    assert Dataset.from_dict({"y": ["yes", "no", None]}, features=features)[:] == {"y": [1, 0, None]}
    for wrong in (lambda: Dataset.from_dict({"y": [2]}, features=features), lambda: ClassLabel(names=["a", "a"])):
        with pytest.raises(ValueError):
            wrong()
    assert Dataset.from_list([{"a": 1}, {"b": 2}]).column_names == ["a"]
    declared = Features({"a": Value("int64"), "b": Value("string")})
    assert Dataset.from_list([{"a": 1, "b": None}], features=declared).features == declared
    assert Value("string") != Value("large_string")


@rests_on_it(
    "src/lockstep/data/value_types.py",
    "src/lockstep/data/stream.py",
    "src/lockstep/data/arrow_cache.py",
    "src/lockstep/data/file_formats.py",
)
def test_a_table_in_memory_is_a_data_set_without_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Dataset made of an InMemoryTable keeps the fingerprint and features passed to it and reads nothing of the
    table. data.nbytes is the table's size, data.num_rows its number of rows."""
    from datasets import Dataset, DatasetInfo, Features, Value
    from datasets.table import InMemoryTable

    table = pa.table({"x": pa.array([1, 2], pa.int64())})
    features = Features({"x": Value("int64")})
    made = Dataset(InMemoryTable(table), info=DatasetInfo(features=features), fingerprint="given")
    assert (made._fingerprint, made.features) == ("given", features)
    assert (made.data.nbytes, made.data.num_rows) == (16, 2)
    with pytest.raises(ValueError, match="match"):
        Dataset(InMemoryTable(table), info=DatasetInfo(features=Features({"x": Value("string")})), fingerprint="given")


@rests_on_it("src/lockstep/data/hub_rows.py")
def test_the_configuration_of_a_reader_has_its_options_as_fields() -> None:
    """CsvConfig and JsonConfig are dataclasses, whose fields of a new instance are the defaults. CsvConfig's delimiter
    also sets its sep."""
    from dataclasses import fields

    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig

    for kind in (CsvConfig, JsonConfig):
        assert {getattr(kind(), field.name) == getattr(kind(), field.name) for field in fields(kind)} == {True}
    usual, other = CsvConfig(), CsvConfig(delimiter=";")
    assert (usual.sep, usual.delimiter, other.sep, other.delimiter) == (",", None, ";", ";")
    odd = [field.name for field in fields(other) if getattr(other, field.name) != getattr(usual, field.name)]
    assert {*odd} == {"sep", "delimiter"}
