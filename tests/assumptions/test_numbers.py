"""Assumptions about numpy: dtypes of results, order, rounding, ties, empty arrays."""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support.assumed import rests_on_it

BIG = np.array([2**63 + 1, 2**63 + 3], np.uint64)  # equal as float64


@rests_on_it(
    "src/lockstep/data/arrow_cache.py",
    "src/lockstep/data/masking.py",
    "src/lockstep/data/order.py",
    "src/lockstep/data/raw_rows.py",
    "src/lockstep/tasks/objectives/objective.py",
)
def test_a_stable_argsort_of_negated_keys_is_descending() -> None:
    """np.argsort(-keys, kind="stable") of int32, int64 and float64 is descending and keeps ties in their original
    order. Along axis 1 it sorts each row, also of uint64."""
    for dtype in (np.int32, np.int64, np.float64):
        assert np.argsort(-np.array([2, 5, 2, 5], dtype), kind="stable").tolist() == [1, 3, 0, 2]
    rows = np.array([[2**64 - 1, 7, 7], [1, 2**63 + 1, 2**63]], np.uint64)
    assert np.argsort(rows, axis=1, kind="stable").tolist() == [[1, 2, 0], [0, 2, 1]]


@rests_on_it(
    "src/lockstep/data/splitting.py",
    "src/lockstep/data/order.py",
    "src/lockstep/data/streamed.py",
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/tasks/own_metrics.py",
    "src/lockstep/tasks/objectives/objective.py",
    "src/lockstep/data/arrow_cache.py",
    "src/lockstep/data/stream.py",
    "src/lockstep/tasks/embedding.py",
)
def test_searchsorted_is_exact() -> None:
    """np.searchsorted compares uint64 with uint64 exactly, beyond 2**53 too. Its result is int64, also for an empty
    array: the position before equal values, or after them with side "right"."""
    assert np.searchsorted(BIG, BIG).tolist() == [0, 1]
    assert np.searchsorted(BIG, np.uint64(2**63 + 2)) == 1
    ends = np.cumsum([0, 3, 0, 2])
    assert np.searchsorted(ends, [0, 2, 3, 4], side="right").tolist() == [1, 1, 3, 3]
    assert np.searchsorted(ends, [0, 3, 5]).tolist() == [0, 1, 3]
    assert np.searchsorted(np.empty(0, np.uint64), BIG).tolist() == [0, 0]


@rests_on_it(
    "src/lockstep/data/splitting.py",
    "src/lockstep/data/order.py",
    "src/lockstep/data/token_checks.py",
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/tasks/models/retrieval.py",
    "src/lockstep/tasks/objectives/objective.py",
    "src/lockstep/tasks/answer_pairs.py",
    "src/lockstep/data/masking.py",
    "src/lockstep/data/stream.py",
    "src/lockstep/tasks/embedding.py",
    "src/lockstep/tasks/models/token_rows.py",
    "src/lockstep/tasks/modules/dataset.py",
    "src/lockstep/tasks/modules/loss_probe.py",
    "src/lockstep/tasks/objectives/one_label.py",
    "src/lockstep/tasks/objectives/regression.py",
    "src/lockstep/tasks/task.py",
    "src/lockstep/tasks/token_classification.py",
)
def test_unique_and_set_operations_are_sorted() -> None:
    """np.unique sorts. In one dimension it returns first indices, inverse and counts, each of one dimension. With
    axis=0 it sorts rows, uint64 exactly, and keeps two columns if there are no rows. setdiff1d and intersect1d are
    sorted and distinct. isin of an empty set is False."""
    values, first, inverse, counts = np.unique(
        np.array([5, 1, 5]), return_index=True, return_inverse=True, return_counts=True
    )
    assert [each.tolist() for each in (values, first, inverse, counts)] == [[1, 5], [1, 0], [1, 0, 1], [1, 2]]
    assert np.unique(np.stack([BIG[::-1], BIG], 1), axis=0).tolist() == [
        [2**63 + 1, 2**63 + 3],
        [2**63 + 3, 2**63 + 1],
    ]
    assert np.unique(np.empty((0, 2), np.uint64), axis=0).shape == (0, 2)
    assert np.setdiff1d([3, 1, 2, 1], [2]).tolist() == [1, 3]
    assert np.intersect1d([9, 1, 1], [9, 1, 3]).tolist() == [1, 9]
    assert np.isin([1, 2], np.array([])).tolist() == [False, False]


@rests_on_it(
    "src/lockstep/tasks/objectives/objective.py",
    "src/lockstep/tasks/models/retrieval.py",
    "src/lockstep/tasks/own_metrics.py",
    "src/lockstep/data/labels.py",
    "src/lockstep/data/order.py",
    "src/lockstep/data/splitting.py",
    "src/lockstep/plain/examples.py",
    "src/lockstep/tasks/objectives/one_label.py",
)
def test_bincount() -> None:
    """np.bincount returns int64 of length at least minlength. With weights, also booleans, it returns float64. For an
    empty input all counts are 0."""
    counts = np.bincount(np.array([1, 1, 0]), minlength=4)
    assert (counts.tolist(), counts.dtype) == ([1, 2, 0, 0], np.int64)
    weighted = np.bincount(np.array([1, 1, 0]), np.array([True, True, False]))
    assert (weighted.tolist(), weighted.dtype) == ([0.0, 2.0], np.float64)
    assert np.bincount(np.empty(0, np.int64), np.empty(0), 3).tolist() == [0.0, 0.0, 0.0]


@rests_on_it(
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/tasks/models/retrieval.py",
    "src/lockstep/data/masking.py",
    "src/lockstep/tasks/language_modeling.py",
)
def test_reduceat_and_repeated_indices() -> None:
    """np.add.reduceat sums from each index to the next one. np.add.at and np.minimum.at apply a repeated index each
    time. maximum.accumulate runs along an axis. put_along_axis writes at the indices of argsort."""
    numbers = np.array([1, 2, 3, 4], np.int32) * np.array([True, False, True, True])
    sums = np.add.reduceat(numbers, [0, 1, 3], dtype=np.int64)
    assert (sums.tolist(), sums.dtype) == ([1, 3, 4], np.int64)
    added, least = np.zeros(2, np.int64), np.full(2, 9)
    np.add.at(added, [0, 0, 1], [1, 2, 5])
    np.minimum.at(least, [0, 0, 1], [4, 2, 7])
    assert (added.tolist(), least.tolist()) == ([3, 5], [2, 7])
    assert np.maximum.accumulate([[1, 0, 3], [5, 2, 0]], axis=1).tolist() == [[1, 1, 3], [5, 5, 5]]
    mask = np.zeros((2, 3), bool)
    np.put_along_axis(mask, np.array([[2, 0, 1], [1, 2, 0]]), np.arange(3)[None] < np.array([[1], [2]]), axis=1)
    assert mask.tolist() == [[False, False, True], [False, True, True]]


@rests_on_it("src/lockstep/data/lm_documents.py")
def test_insert_counts_positions_in_the_original() -> None:
    """np.insert with several positions, equal ones too, counts them in the original array, and keeps its dtype."""
    ids = np.insert(np.array([1, 2, 3], np.int32), [0, 2, 2, 3], 9)
    assert (ids.tolist(), ids.dtype) == ([9, 1, 2, 9, 9, 3, 9], np.int32)
    assert np.insert(np.array([False]), [1], True).dtype == bool


@rests_on_it(
    "src/lockstep/data/order.py",
    "src/lockstep/data/masking.py",
    "src/lockstep/data/arrow_cache.py",
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/data/stream.py",
    "src/lockstep/data/splitting.py",
    "src/lockstep/data/conversations.py",
    "src/lockstep/data/labels.py",
    "src/lockstep/data/qa_features.py",
    "src/lockstep/data/streamed.py",
    "src/lockstep/data/text_pairs.py",
    "src/lockstep/data/token_checks.py",
    "src/lockstep/data/usable_rows.py",
    "src/lockstep/plain/examples.py",
    "src/lockstep/tasks/image_classification.py",
    "src/lockstep/tasks/language_modeling.py",
    "src/lockstep/tasks/models/retrieval.py",
    "src/lockstep/tasks/objectives/objective.py",
    "src/lockstep/tasks/objectives/one_label.py",
    "src/lockstep/tasks/objectives/several_labels.py",
    "src/lockstep/tasks/objectives/regression.py",
    "src/lockstep/tasks/per_token.py",
    "src/lockstep/tasks/question_answering.py",
    "src/lockstep/tasks/task.py",
    "src/lockstep/tasks/token_classification.py",
    "src/lockstep/tasks/translation.py",
)
def test_dtypes_of_results() -> None:
    """Sums and cumulative sums of int32 and of booleans are int64, of uint64 uint64. uint64 combined with uint64 stays
    uint64; divided by a float it is float64. A Python number does not widen int32. r_ and concatenate of booleans are
    boolean."""
    small, big = np.array([2**31 - 1, 1], np.int32), np.array([2**63], np.uint64)
    assert (small.sum(), np.sum(small).dtype, np.cumsum(small)[-1]) == (2**31, np.int64, 2**31)
    assert np.cumsum(np.array([True, True])).dtype == np.int64
    assert big.sum().dtype == np.uint64
    assert ((big ^ np.uint64(1)).dtype, (big / 2.0**64).dtype, (-small).dtype) == (np.uint64, np.float64, np.int32)
    assert np.where([True, False], small, -100).dtype == np.int32
    assert np.r_[True, np.array([False])].dtype == np.concatenate([np.empty(0, bool), [True]]).dtype == bool
    assert np.concatenate([[0], small]).dtype == np.concatenate([np.empty(0, np.int64), small]).dtype == np.int64


@rests_on_it(
    "src/lockstep/data/masking.py",
    "src/lockstep/tasks/objectives/objective.py",
    "src/lockstep/tasks/embedding.py",
    "src/lockstep/data/order.py",
    "src/lockstep/data/streamed.py",
    "src/lockstep/tasks/language_modeling.py",
)
def test_rounding_and_argmax() -> None:
    """np.rint and np.round round halves to the even number. astype(int) truncates towards zero. argmax returns the
    first of equal values, or a NaN if there is one."""
    assert np.rint([0.5, 1.5, 2.5]).tolist() == np.round([0.5, 1.5, 2.5]).tolist() == [0.0, 2.0, 2.0]
    assert np.array([2.9, -2.9]).astype(int).tolist() == [2, -2]
    assert np.argmax([1, 3, 3]) == 1
    assert np.argmax([1.0, np.nan, 3.0]) == 1


@rests_on_it(
    "src/lockstep/tasks/task.py",
    "src/lockstep/tasks/language_modeling.py",
    "src/lockstep/tasks/embedding.py",
    "src/lockstep/tasks/modules/dataset.py",
    "src/lockstep/tasks/modules/loss_probe.py",
    "src/lockstep/tasks/objectives/regression.py",
    "src/lockstep/lab/init/columns.py",
    "src/lockstep/data/raw_rows.py",
    "src/lockstep/tasks/objectives/objective.py",
    "src/lockstep/tasks/own_metrics.py",
)
def test_linspace_of_indices() -> None:
    """linspace(0, n - 1, n) converted to integers is 0 to n - 1, and its last value is exact for any count."""
    for count in (1, 2, 3, 7, 49, 98, 107, 161, 187, 500, 1000):
        assert np.linspace(0, count - 1, count).astype(np.int64).tolist() == list(range(count))
        assert np.linspace(0, 10**6 - 1, count)[-1] == (10**6 - 1 if count > 1 else 0)
    assert np.unique(np.linspace(0, 1, 500).astype(np.int64)).tolist() == [0, 1]


@rests_on_it(
    "src/lockstep/tasks/own_metrics.py", "src/lockstep/tasks/objectives/objective.py", "src/lockstep/plain/scores.py"
)
def test_quantile_masked_division_and_empty_mean() -> None:
    """np.quantile interpolates linearly. np.divide with where keeps the other values of out, without a warning. The
    mean of an empty array warns, so lockstep tests for that first."""
    assert np.quantile([4, 1, 2], [0, 0.25, 0.75, 1]).tolist() == [1.0, 1.5, 3.0, 4.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divided = np.divide([1.0, 2.0], [0.0, 4.0], out=np.full(2, 7.0), where=np.array([False, True]))
        with pytest.raises(RuntimeWarning):
            np.mean([])
    assert divided.tolist() == [7.0, 0.5]


@rests_on_it("src/lockstep/plain/train.py")
def test_interp_is_linear_and_constant_outside() -> None:
    """np.interp is linear between its points, and returns the first or the last value outside them."""
    assert [float(np.interp(step, [10, 20], [1.0, 3.0])) for step in (0, 10, 15, 99)] == [1.0, 1.0, 2.0, 3.0]


@rests_on_it("src/lockstep/data/splitting.py", "src/lockstep/data/lm_documents.py")
def test_frombuffer_and_saved_arrays(tmp_path: Path) -> None:
    """np.frombuffer views bytes in native byte order, read-only; a view of a shared mmap is writable. np.load returns
    what np.save wrote, and refuses object arrays."""
    codes = "a\u3000\ud800".encode("utf-32-le", "surrogatepass")
    assert np.frombuffer(codes, np.uint32).tolist() == [97, 0x3000, 0xD800]
    memory = mmap.mmap(-1, 16)
    one, other = (np.frombuffer(memory, np.uint64, 2) for _ in range(2))
    one[1] = 7
    assert other.tolist() == [0, 7]
    with pytest.raises(ValueError, match="read-only"):
        np.frombuffer(bytes(8), np.uint64)[0] = 1
    np.save(tmp_path / "a.npy", BIG.reshape(1, 2))
    loaded = np.load(tmp_path / "a.npy")
    assert (loaded.tolist(), loaded.dtype) == ([[2**63 + 1, 2**63 + 3]], np.uint64)
    np.save(tmp_path / "b.npy", np.array([None]))
    with pytest.raises(ValueError, match="allow_pickle"):
        np.load(tmp_path / "b.npy")


@rests_on_it(
    "src/lockstep/data/arrow_cache.py",
    "src/lockstep/data/stream.py",
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/data/usable_rows.py",
    "src/lockstep/data/raw_rows.py",
)
def test_arrow_arrays_are_viewed_without_a_copy() -> None:
    """np.from_dlpack views a pyarrow array of numbers without a copy, also an empty one and the offsets of a list
    array. It raises for nulls and for booleans, which Arrow stores as bits."""
    array = pa.array([1, 2, 3], pa.int64())
    assert np.from_dlpack(array).ctypes.data == array.buffers()[1].address
    for dtype in (pa.int32(), pa.uint64(), pa.float64(), pa.int8()):
        assert np.from_dlpack(pa.array([], dtype)).dtype == dtype.to_pandas_dtype()
    for refused in ([1, None], [True]):
        with pytest.raises((pa.ArrowInvalid, TypeError, ValueError)):
            np.from_dlpack(pa.array(refused))
    lists = pa.array([[9], [1, 2], [], [3]]).slice(1)
    assert np.from_dlpack(lists.offsets).tolist() == [1, 3, 3, 4]
    assert np.from_dlpack(pa.array([True, False, True]).cast(pa.uint8())).tolist() == [1, 0, 1]


@rests_on_it("src/lockstep/data/arrow_cache.py")
def test_operators_call_array_ufunc() -> None:
    """NDArrayOperatorsMixin passes each operator, reflected ones and comparisons too, to __array_ufunc__. np.asarray
    and functions that are not ufuncs call __array__. astype(None) is float64."""

    class Column(np.lib.mixins.NDArrayOperatorsMixin):
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            numbers = np.array([1, 5], np.int32)
            assert numbers.astype(None).dtype == np.float64
            return numbers if dtype is None else numbers.astype(dtype)

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
            names.append((ufunc.__name__, method))
            return getattr(ufunc, method)(*(np.asarray(g) if g is self else g for g in inputs), **options)

    names: list[tuple[str, str]] = []
    column: Any = Column()
    assert (column + 1).tolist() == [2, 6]
    assert (column > 2).tolist() == [False, True]
    assert (7 - column).tolist() == [6, 2]
    assert (-column).dtype == np.int32
    assert names == [("add", "__call__"), ("greater", "__call__"), ("subtract", "__call__"), ("negative", "__call__")]
    assert np.searchsorted(column, 3) == 1
    assert np.asarray(column, np.int64).dtype == np.int64
