"""Columns of the tokenised data: views of mapped memory, padded for a micro-batch."""

import os
from pathlib import Path

import numpy as np
import pytest
from harness import tiny
from test_data import prepared

from lockstep.data.tokens import Columns, Ragged


@pytest.fixture(scope="module")
def columns() -> Columns:
    return Columns(prepared(tiny()).splits["train"])


def test_rows_are_views_of_mapped_memory(columns: Columns) -> None:
    ragged = columns.ragged("input_ids")
    assert columns.ragged("input_ids") is ragged
    assert len(columns) == 100
    assert columns.lengths.tolist() == [len(ragged.row(i)) for i in range(100)]
    for i in (0, 57, 99):
        assert any(np.shares_memory(ragged.row(i), values) for values in ragged._values)
        assert not ragged.row(i).flags.owndata
        assert not ragged.row(i).flags.writeable


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the memory map of the process")
def test_the_file_is_mapped_and_not_read() -> None:
    path = prepared(tiny()).splits["validation"]
    opened = Columns(path)
    start = opened.ragged("input_ids")._values[0].__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        if low <= start < high:
            assert line.endswith(os.path.realpath(path))
            return
    raise AssertionError("the tokens lie in no mapping")


def test_padding(columns: Columns) -> None:
    ragged: Ragged = columns.ragged("input_ids")
    rows = np.array([5, 50, 7])
    lengths = columns.lengths[rows]
    for multiple, left in ((1, False), (1, True), (8, False), (8, True)):
        ids, mask = ragged.padded(rows, -7, multiple, left)
        width = -(-max(lengths) // multiple) * multiple
        assert ids.shape == mask.shape == (3, width)
        assert ids.dtype == np.int64
        for i, row in enumerate(rows):
            assert ids[i][mask[i] == 1].tolist() == ragged.row(int(row)).tolist()
            assert (ids[i][mask[i] == 0] == -7).all()
            ones = np.flatnonzero(mask[i])
            assert (ones[-1] == width - 1) if left else (ones[0] == 0)


def test_rows_are_found_across_chunks() -> None:
    import pyarrow as pa

    parts = [pa.array(p, pa.list_(pa.int32())) for p in ([[1, 2], []], [], [[3], [4, 5, 6]])]
    ragged = Ragged(pa.chunked_array([*parts, parts[2].slice(1)]))
    assert [ragged.row(i).tolist() for i in range(5)] == [[1, 2], [], [3], [4, 5, 6], [4, 5, 6]]
    assert ragged.lengths.tolist() == [2, 0, 1, 3, 3]
