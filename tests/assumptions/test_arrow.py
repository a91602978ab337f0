"""Assumptions about pyarrow: arrays from Python values, schemas, files, comparisons of columns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from support.assumed import rests_on_it


def written(path: Path, table: pa.Table) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return path


@rests_on_it(
    "src/lockstep/data/arrow_cache.py",
    "src/lockstep/data/value_types.py",
    "src/lockstep/tasks/masked_language_modeling.py",
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/data/usable_rows.py",
    "src/lockstep/tasks/image_classification.py",
)
def test_pa_array_converts_values_or_raises() -> None:
    """pa.array with a type raises for integers out of range, booleans and strings as numbers, numbers as strings, lone
    surrogates, and numpy floats with a fraction; it truncates Python floats to integers. Rows of lists may be numpy
    arrays. Keys that a struct type lacks are dropped, and missing keys are null."""
    wrong: list[tuple[Any, pa.DataType]] = [
        ([2**40], pa.int32()),
        (np.array([2**40]), pa.int32()),
        ([2**63], pa.int64()),
        ([True], pa.int32()),
        (["1"], pa.int32()),
        ([1], pa.string()),
        (["\ud800"], pa.string()),
        (np.array([1.5]), pa.int32()),
    ]
    for values, kind in wrong:
        with pytest.raises((pa.ArrowException, TypeError, ValueError, OverflowError)):
            pa.array(values, kind)
    assert pa.array([1.5, 2.0], pa.int32()).to_pylist() == [1, 2]
    assert pa.array([np.array([1, 2]), [3], None], pa.list_(pa.int32())).to_pylist() == [[1, 2], [3], None]
    structures = pa.array([{"a": 1, "z": 2}, {}, None], pa.struct({"a": pa.int64()}))
    assert structures.to_pylist() == [{"a": 1}, {"a": None}, None]
    assert pa.array([1, 2.5, None]).type == pa.float64()
    with pytest.raises(pa.ArrowInvalid):
        pa.array([1, "a"])


@rests_on_it(
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/tasks/image_classification.py",
    "src/lockstep/data/raw_rows.py",
    "src/lockstep/tasks/masked_language_modeling.py",
)
def test_list_arrays_from_offsets_and_casts_to_a_schema() -> None:
    """ListArray.from_arrays takes numpy's int32 offsets, also for empty lists. record_batch casts columns, nested lists
    included, to its schema and raises if a number does not fit. filter drops rows whose mask is null or False."""
    lists = pa.ListArray.from_arrays(np.array([0, 2, 2, 3], np.int32), np.array([1, 2, 3], np.int64))
    assert lists.to_pylist() == [[1, 2], [], [3]]
    schema = pa.schema([("x", pa.list_(pa.int32()))])
    batch = pa.record_batch([lists], schema=schema)
    assert batch.schema == schema
    assert batch.filter(pa.array([True, None, False])).to_pydict() == {"x": [[1, 2]]}
    with pytest.raises(pa.ArrowInvalid):
        pa.record_batch([pa.array([2**40])], schema=pa.schema([("x", pa.int32())]))


@rests_on_it(
    "src/lockstep/data/arrow_cache.py",
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/data/row_reader.py",
    "src/lockstep/data/usable_rows.py",
    "src/lockstep/data/value_types.py",
    "src/lockstep/tasks/image_classification.py",
    "src/lockstep/tasks/modules/dataset.py",
)
def test_combine_chunks_gives_one_batch() -> None:
    """combine_chunks().to_batches() merges all batches into one, in order; a table without batches gives none. A slice
    of a table's column can become a record batch of that slice. batch.slice(start, count) has those rows."""
    parts = [pa.record_batch({"x": pa.array(values)[1:]}) for values in ([9, 1], [9, 2, 3])]
    (whole,) = pa.Table.from_batches(parts).combine_chunks().to_batches()
    assert whole.to_pydict() == {"x": [1, 2, 3]}
    assert whole.slice(1, 1).to_pydict() == {"x": [2]}
    assert pa.Table.from_batches([], whole.schema).combine_chunks().to_batches() == []


@rests_on_it(
    "src/lockstep/data/stream.py",
    "src/lockstep/data/arrow_cache.py",
    "src/lockstep/data/cache.py",
    "src/lockstep/data/row_reader.py",
)
def test_schema_metadata_is_stored_and_can_be_removed(tmp_path: Path) -> None:
    """from_pylist takes a schema, keeps uint64 exactly and fills absent keys with null. An IPC stream stores the
    schema's metadata as bytes. replace_schema_metadata(None) and schema(list(...)) remove it; concat_tables then
    accepts tables that differ only in metadata."""
    schema = pa.schema({"a": "int64", "hash": "uint64"}).with_metadata({"told": '{"x": 1}'})
    table = pa.Table.from_pylist([{"a": 1, "hash": 2**64 - 1, "z": 0}, {"hash": 0}], schema)
    with pa.memory_map(str(written(tmp_path / "a", table))) as mapped:
        read = pa.ipc.open_stream(mapped).read_all()
    assert read.to_pydict() == {"a": [1, None], "hash": [2**64 - 1, 0]}
    assert read.schema.metadata == {b"told": b'{"x": 1}'}
    assert read.replace_schema_metadata(None).schema.metadata is None
    assert pa.schema(list(read.schema)).metadata is None
    plain = read.replace_schema_metadata(None)
    assert pa.concat_tables([plain, plain[:1]]).column("a").to_pylist() == [1, None, 1]
    with pytest.raises(pa.ArrowInvalid):
        pa.concat_tables([plain, pa.table({"a": ["x"], "hash": ["y"]})])


@rests_on_it(
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/data/row_files.py",
    "src/lockstep/data/file_formats.py",
    "src/lockstep/data/cache.py",
    "src/lockstep/data/row_reader.py",
    "src/lockstep/data/stream.py",
    "src/lockstep/data/usable_rows.py",
    "src/lockstep/data/value_types.py",
)
def test_ipc_files_and_streams_are_different_formats(tmp_path: Path) -> None:
    """An IPC file, with lz4 compression too, has one batch per write_table call with a one-batch table. get_batch reads
    one batch, which stays valid after the memory map is closed. Reading a stream as a file, a file as a stream, or an
    empty file raises ArrowInvalid; a missing file raises FileNotFoundError."""
    options, path = pa.ipc.IpcWriteOptions(compression="lz4"), tmp_path / "file"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, pa.schema({"a": "int32"}), options=options) as out:
        for values in ([1, 2, 3], [7]):
            out.write_table(pa.table({"a": pa.array(values, pa.int32())}))
    with pa.memory_map(str(path)) as mapped:
        opened = pa.ipc.open_file(mapped)
        batches = [opened.get_batch(number) for number in range(opened.num_record_batches)]
    assert [each.to_pydict() for each in batches] == [{"a": [1, 2, 3]}, {"a": [7]}]
    stream = written(tmp_path / "stream", pa.table({"a": [1]}))
    (tmp_path / "empty").touch()
    for name, read in (("file", pa.ipc.open_stream), ("stream", pa.ipc.open_file), ("empty", pa.ipc.open_stream)):
        with pytest.raises(pa.ArrowInvalid), pa.memory_map(str(stream.with_name(name))) as mapped:
            read(mapped)
    with pytest.raises(FileNotFoundError):
        pa.memory_map(str(tmp_path / "none"))


@rests_on_it(
    "src/lockstep/data/row_reader.py",
    "src/lockstep/data/row_files.py",
    "src/lockstep/data/file_formats.py",
    "src/lockstep/data/arrow_cache.py",
    "src/lockstep/data/cache.py",
)
def test_parquet_footer_has_row_groups_and_schema(tmp_path: Path) -> None:
    """ParquetFile has num_row_groups, and rows and bytes of each row group in metadata. read_schema and schema_arrow
    keep the schema's metadata. A damaged file raises an ArrowException, a missing one FileNotFoundError."""
    table = pa.table({"a": [1, 2, 3]}).replace_schema_metadata({"k": "v"})
    pq.write_table(table, tmp_path / "a", row_group_size=2)
    with pq.ParquetFile(tmp_path / "a") as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        assert [group.num_rows for group in groups] == [2, 1]
        assert all(group.total_byte_size > 0 for group in groups)
        assert (file.metadata.num_rows, file.schema_arrow.metadata) == (3, {b"k": b"v"})
    assert pq.read_schema(tmp_path / "a") == table.schema
    (tmp_path / "bad").write_bytes((tmp_path / "a").read_bytes()[:-3])
    with pytest.raises(pa.ArrowException):
        pq.ParquetFile(tmp_path / "bad")
    with pytest.raises(FileNotFoundError):
        pq.ParquetFile(tmp_path / "none")


@rests_on_it("src/lockstep/data/usable_rows.py", "src/lockstep/data/raw_rows.py")
def test_null_and_nan_in_comparisons() -> None:
    """is_null(nan_is_null=True) is true for NaN too, and accepts strings and lists. `or_` of a boolean and null is
    null. Comparisons with NaN are False, but is_in matches NaN. invert of null is null, and fill_null replaces it."""
    assert pc.is_null(pa.array([float("nan"), None, 1.0]), nan_is_null=True).to_pylist() == [True, True, False]
    for values in (["", None], [[], None]):
        assert pc.is_null(pa.array(values), nan_is_null=True).to_pylist() == [False, True]
    nothing = pa.array([None, None], pa.bool_())
    assert pc.or_(pa.array([True, False]), nothing).to_pylist() == [None, None]
    assert pc.greater_equal(pa.array([float("nan"), None]), 1).to_pylist() == [False, None]
    assert pc.is_in(pa.array([float("nan")]), value_set=pa.array([float("nan")])).to_pylist() == [True]
    assert pc.fill_null(pc.invert(pa.array([True, None])), False).to_pylist() == [False, False]
    assert pc.is_valid(pa.array([1, None])).to_pylist() == [True, False]


@rests_on_it(
    "src/lockstep/data/usable_rows.py", "src/lockstep/data/arrow_cache.py", "src/lockstep/data/lm_documents.py"
)
def test_number_comparisons_are_exact_or_raise() -> None:
    """Comparing integers beyond 2**53 with a float, or casting them to float64, raises ArrowInvalid; with a larger
    integer they compare as numbers. uint64 beyond 2**63 compared with an integer raises. float16 has no comparison
    kernel: an ArrowException. A float64 value cast to float32 is rounded, so 0.7 matches in a float32 column."""
    big = pa.array([2**53 + 1, 5])
    for call in (lambda: big.cast(pa.float64()), lambda: pc.greater_equal(big, 5.5)):
        with pytest.raises(pa.ArrowInvalid):
            call()
    with pytest.raises(pa.ArrowInvalid):
        pc.greater_equal(pa.array([2**63], pa.uint64()), 1)
    with pytest.raises(pa.ArrowException):
        pc.greater_equal(pa.array([1.0], pa.float16()), 1.5)
    assert pc.greater_equal(pa.array([1, 2], pa.int8()), 300).to_pylist() == [False, False]
    small = pa.array([0.7], pa.float32())
    assert pc.is_in(small, value_set=pa.array([0.7]).cast(pa.float32())).to_pylist() == [True]
    assert pc.greater_equal(small, 0.7).to_pylist() == [False]
    with pytest.raises(pa.ArrowInvalid):
        pa.array([-1]).cast(pa.uint8())


@rests_on_it("src/lockstep/data/usable_rows.py")
def test_null_structs_and_lists() -> None:
    """struct_field of a null struct is null, also in a slice. list_value_length and list_flatten accept fixed-size
    lists and skip null lists. take with an index out of range raises."""
    structures = pa.array([{"a": 9}, None, {"a": 1}])[1:]
    assert pc.struct_field(structures, [0]).to_pylist() == [None, 1]
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2))
    assert pc.list_value_length(fixed).to_pylist() == [2, None, 2]
    assert pc.list_flatten(fixed).to_pylist() == [1, 2, 3, 4]
    with pytest.raises(pa.ArrowException):
        pa.array([1]).take(pa.array([1]))
    assert pc.unique(pa.chunked_array([[2, 1], [2]])).to_pylist() == [2, 1]


@rests_on_it("src/lockstep/data/usable_rows.py", "src/lockstep/data/stream.py", "src/lockstep/data/lm_documents.py")
def test_type_predicates_are_exclusive() -> None:
    """is_list, is_large_list and is_fixed_size_list are each true for one kind of list only. is_string is false for
    large strings. is_floating is true for float16; is_floating and is_integer are false for decimals and booleans.
    JSON's type is an extension type, not a string."""
    kinds = [pa.list_(pa.int8()), pa.large_list(pa.int8()), pa.list_(pa.int8(), 2)]
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    assert [[test(kind) for test in tests] for kind in kinds] == np.eye(3, dtype=bool).tolist()
    assert [pa.types.is_string(kind) for kind in (pa.string(), pa.large_string(), pa.json_())] == [True, False, False]
    assert isinstance(pa.json_(), pa.BaseExtensionType)
    others = (pa.float16(), pa.decimal128(3), pa.bool_(), pa.uint8())
    assert [pa.types.is_floating(kind) for kind in others] == [True, False, False, False]
    assert [pa.types.is_integer(kind) for kind in others] == [False, False, False, True]


@rests_on_it("src/lockstep/data/file_formats.py")
def test_a_compressed_stream_of_zstd_is_read_as_bytes(tmp_path: Path) -> None:
    """CompressedInputStream reads, from a path or a Python file, the bytes that CompressedOutputStream compressed with
    zstd. It raises OSError or ArrowException if the input is not zstd."""
    with pa.OSFile(str(tmp_path / "a"), "wb") as file, pa.CompressedOutputStream(file, "zstd") as out:
        out.write(b"text" * 1000)
    with open(tmp_path / "a", "rb") as own:
        for source in (pa.OSFile(str(tmp_path / "a")), own):
            assert pa.CompressedInputStream(source, "zstd").read() == b"text" * 1000
    (tmp_path / "b").write_bytes(os.urandom(8) + b"no zstd")
    with pytest.raises((OSError, pa.ArrowException)):
        pa.CompressedInputStream(pa.OSFile(str(tmp_path / "b")), "zstd").read()
