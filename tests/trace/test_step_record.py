"""Records of steps: written and read again, compared in the order of computation, and what proves nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.proof import diff
from lockstep.training import step_record
from lockstep.training.step_record import (
    MicroBatchValue,
    StepRecord,
    compare_records,
    factors_of,
    print_of,
    prints_of,
    read_records,
    record_differences,
    write_records,
)
from lockstep_trace.coded import TraceError
from support.messages import raises


def record(step: int = 1, **changes: Any) -> StepRecord:
    """A record that holds everything."""
    ones = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    computed = [
        MicroBatchValue("inputs", "", 0, print_of(torch.arange(4), torch.ones(4))),
        MicroBatchValue("output", "layer", 0, print_of(torch.ones(2))),
        MicroBatchValue("loss", "", 0, print_of(torch.tensor(0.5))),
        MicroBatchValue("leaf gradient", "a", 1, print_of(ones["a"]), rank=1),
    ]
    full = StepRecord.of_numbers(
        step,
        0.5,
        2.0,
        weights="w",
        optimizer="o",
        finite=True,
        targets=(4.0, 4.0),
        rate=1e-3,
        examples=print_of(torch.arange(4)),
        before=prints_of(ones),
        computed=tuple(computed),
        gradients=prints_of({n: 2 * t for n, t in ones.items()}),
        after=prints_of({n: t - 0.1 for n, t in ones.items()}),
    )
    return replace(full, **changes)


def test_records_round_trip(tmp_path: Path) -> None:
    records = [record(), StepRecord.of_numbers(2, math.nan, 1.0), StepRecord(3, weights="w")]
    write_records(tmp_path / "records.jsonl", {"of": "a test"}, records)
    about, read = read_records(tmp_path / "records.jsonl")
    assert read == records
    assert about["of"] == "a test"
    assert json.loads((tmp_path / "records.jsonl").read_text().splitlines()[2])["loss"] is None


@pytest.mark.parametrize(
    ("content", "code"),
    [("{", "LS9150"), ("", "LS9151"), ("{}", "LS9151"), ("[1]", "LS9151"), ('{"format": 2}\n{"loss": 1}', "LS9152"),
     ('{"format": 2}\n[]', "LS9152"), ('{"format": 2}\n{"step": 1, "after": {"a": {}}}', "LS9152")],
)  # fmt: skip
def test_invalid_files_are_refused(content: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text(content)
    with raises(code, "records.jsonl", error=TraceError):
        read_records(tmp_path / "records.jsonl")


CHANGES = {
    "start weights": {"before": prints_of({"a": torch.zeros(2, 3), "b": torch.ones(3)})},
    "examples": {"examples": print_of(torch.arange(4).flip(0))},
    "output": {"computed": tuple(replace(c, print=print_of(torch.zeros(2))) for c in record().computed[1:2])},
    "loss": {"loss": 0.25, "hash": "0", "computed": ()},
    "gradient": {"gradients": prints_of({"a": torch.ones(2, 3), "b": torch.ones(3)})},
    "norm": {"grad_norm": 2.5, "hash": "0"},
    "learning rate": {"rate": 2e-3},
    "update": {"after": prints_of({"a": torch.ones(2, 3) - 0.1})},
    "weights": {"weights": "v"},
    "optimizer": {"optimizer": "p"},
}


def test_the_first_difference_is_the_first_in_the_order_of_computation() -> None:
    assert record_differences(record(), record()) == []
    for kind, values in CHANGES.items():
        assert [d.kind for d in record_differences(record(), record(**values))] == [kind]
    kinds = list(CHANGES)
    assert sorted(kinds, key=step_record.ORDER.index) == kinds
    every = {k: v for values in CHANGES.values() for k, v in values.items()}
    assert [d.kind for d in record_differences(record(computed=()), record(**every))] == [
        k for k in kinds if k != "output"
    ]


def test_micro_batch_values_are_compared_before_the_loss_sum() -> None:
    """The sum of the losses comes last, because its order of summation may differ without changing a weight."""
    results = {"loss": 0.25, "grad_norm": 2.5, "hash": "0"}
    assert [d.kind for d in record_differences(record(), record(**results))] == ["norm", "loss sum"]
    leaf = replace(record().computed[3], print=print_of(torch.zeros(2)))
    kinds = [d.kind for d in record_differences(record(), record(**results, computed=(*record().computed[:3], leaf)))]
    assert kinds == ["leaf gradient", "norm", "loss sum"]


def test_every_kind_has_a_text_and_computed_kinds_a_cause() -> None:
    for kind, values in CHANGES.items():
        assert str(record_differences(record(), record(**values))[0])
        assert kind in diff.CAUSES or kind in ("gradient", "weights", "optimizer")  # a sum has a pattern
    assert set(diff.CAUSES) <= set(step_record.ORDER)


def test_entries_of_one_record_are_skipped_or_reported_missing() -> None:
    assert record_differences(record(), StepRecord(1)) == []
    (lost,) = record_differences(record(), record(gradients={"a": record().gradients["a"]}))
    assert (lost.kind, lost.name, lost.missing) == ("gradient", "b", "second")
    (added,) = record_differences(record(gradients={"a": record().gradients["a"]}), record())
    assert (added.name, added.missing) == ("b", "first")
    half = {"before": {"a": record().before["a"]}}  # optimizer state that is made in the first step
    assert record_differences(record(), record(**half)) == record_differences(record(**half), record()) == []
    fewer = record(computed=(*record().computed[1:], replace(record().computed[0], micro_batch=1)))
    assert [(d.kind, d.micro_batch, d.missing) for d in record_differences(record(), fewer)] == [
        ("inputs", 0, "second")
    ]


def test_records_are_compared_step_by_step() -> None:
    a = [record(1), record(2), record(3)]
    assert compare_records(a, []) == compare_records(a, a[::-1]) == []
    assert [(d.step, d.kind) for d in compare_records(a, [record(3, rate=1.0), record(2, weights="v")])] == [
        (2, "weights")
    ]
    assert compare_records([StepRecord(1, weights="w")], [StepRecord(1, optimizer="o")]) == []


def test_nan_infinity_and_signs_of_zero_are_distinguished() -> None:
    nan, inf, zero, minus = (StepRecord.of_numbers(1, loss, 1.0) for loss in (math.nan, math.inf, 0.0, -0.0))
    assert record_differences(nan, nan) == []
    assert (
        [d.kind for d in record_differences(nan, inf)] == [d.kind for d in record_differences(zero, minus)] == ["loss"]
    )


def test_the_print_covers_dtype_shape_and_every_bit() -> None:
    tensor = torch.zeros(2, 3)
    others = [tensor.view(3, 2), tensor.double(), tensor.half(), -tensor]
    assert len({print_of(each).hash for each in (tensor, *others)}) == 5
    assert prints_of({"x": tensor})["x"] == print_of(tensor)
    assert print_of(torch.tensor([3.0]), torch.tensor([4.0])).norm == 5.0
    sparse = torch.eye(3).to_sparse()
    assert print_of(sparse) == print_of(torch.eye(3))
    assert print_of(torch.zeros(0)).norm == 0.0


def test_records_that_prove_nothing() -> None:
    assert record().fault() is None
    assert "not finite" in str(StepRecord.of_numbers(1, math.inf, 1.0).fault())
    assert StepRecord.of_numbers(1, math.inf, 1.0).fault(skips=True) is None
    assert "was changed" in str(record(loss=0.1).fault())
    assert "was changed" in str(record(loss="0.5").fault())
    assert "weights are not finite" in str(record(finite=False).fault())
    masked = {"mask": torch.tensor([-math.inf])}
    assert record(after=prints_of(masked)).fault() is None  # a mask holds infinities
    assert "mask is not finite" in str(record(gradients=prints_of(masked)).fault())
    assert "x is not finite" in str(record(after=prints_of({"x": torch.tensor([math.nan])})).fault())


def test_the_factor_of_gradients() -> None:
    twice = record(gradients=prints_of({"a": 4 * torch.ones(2, 3), "b": 2 * torch.ones(3)}))
    assert factors_of(record(), twice) == (["a"], [pytest.approx(2.0)])
