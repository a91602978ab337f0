"""Columns of tokenized data: views of memory-mapped files, padded per micro-batch."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lockstep.data.arrow_cache import Columns, Ragged, longest_of
from support.harness import tiny
from support.rows import prepared


@pytest.fixture(scope="module")
def columns() -> Columns:
    return Columns(prepared(tiny()).splits["train"])


def test_rows_are_views_of_mapped_memory(columns: Columns) -> None:
    ragged = columns.ragged("input_ids")
    assert columns.ragged("input_ids") is ragged
    assert len(columns) == 100
    assert columns.lengths.tolist() == [len(ragged.row(i)) for i in range(100)]
    for i in (0, 57, 99):
        assert np.shares_memory(ragged.row(i), ragged.row(i).base)
        assert not ragged.row(i).flags.owndata
        assert not ragged.row(i).flags.writeable


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the memory map of the process")
def test_the_file_is_mapped_and_not_read() -> None:
    path = prepared(tiny()).splits["validation"]
    opened = Columns(path)
    start = opened.ragged("input_ids").row(0).__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        if low <= start < high:
            assert line.endswith(os.path.realpath(f"{path}/00000.arrow"))
            return
    raise AssertionError("the tokens lie in no mapping")


def test_selected_examples_form_a_split(columns: Columns) -> None:
    rows = np.array([57, 3, 99])
    few = columns.select(rows)
    assert (len(few), few.names) == (3, columns.names)
    assert few.lengths.tolist() == columns.lengths[rows].tolist()
    for place, row in enumerate(rows.tolist()):
        assert few.ragged("input_ids").row(place).tolist() == columns.ragged("input_ids").row(row).tolist()
    ids, mask = few.ragged("input_ids").padded(np.arange(3), -7)
    assert [ids.tolist(), mask.tolist()] == [each.tolist() for each in columns.ragged("input_ids").padded(rows, -7)]


def test_padding(columns: Columns) -> None:
    ragged: Ragged = columns.ragged("input_ids")
    order = np.argsort(np.asarray(columns.lengths), kind="stable")
    rows = order[[-1, 0, 1]]
    lengths = columns.lengths[rows]
    assert min(lengths) < max(lengths) - 8  # control: some rows are padded
    ids, mask = ragged.padded(rows, -7)
    assert ids.shape == mask.shape == (3, max(lengths))
    assert ids.dtype == np.int64
    for i, row in enumerate(rows):
        assert ids[i][mask[i] == 1].tolist() == ragged.row(int(row)).tolist()
        assert (ids[i][mask[i] == 0] == -7).all()
        assert mask[i].tolist() == sorted(mask[i].tolist(), reverse=True)  # real tokens come first


def test_rows_are_found_across_batches_of_a_file(tmp_path: Path) -> None:
    """Earlier versions wrote files of several batches, and a user's task may."""
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("label", pa.int64())])
    rows = [[[1, 2], []], [], [[3]], [[4, 5, 6], [4, 5, 6]]]
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for number, part in enumerate(rows):
            labels = pa.array([number] * len(part), pa.int64())
            stream.write_batch(pa.record_batch([pa.array(part, schema[0].type), labels], schema=schema))
    columns = Columns(tmp_path / "a.arrow")
    ragged: Ragged = columns.ragged("input_ids")
    assert [ragged.row(i).tolist() for i in range(5)] == [[1, 2], [], [3], [4, 5, 6], [4, 5, 6]]
    assert ragged.lengths.tolist() == [2, 0, 1, 3, 3]
    assert columns.flat("label").tolist() == [0, 0, 2, 3, 3]
    assert columns.flat("label")[np.array([4, 0, 2, 4])].tolist() == [3, 0, 2, 3]
    assert [int(columns.lengths[i]) for i in (0, -1)] == [2, 3]
    assert (columns.lengths < 3).tolist() == [True, True, True, False, False]
    assert columns.longest(3).tolist() == [3, 4, 0]
    assert columns.mean_length == 9 / 5
    with pytest.raises(IndexError):
        columns.lengths[5]


def test_the_longest_examples_follow_a_stable_sort(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 1000).astype(np.int32)
    for count in (1, 7, 999, 1000, 5000):
        wanted = np.argsort(-lengths, kind="stable")[:count]
        assert (longest_of(lengths, count) == wanted).all()
