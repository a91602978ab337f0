"""The record of a training step, and the first difference between two: lockstep's definition of equal steps.

In: numbers and tensors of a step, from any source. Out: `StepRecord`, one JSON object a line; `record_differences` and
`compare_records`, in the order of `ORDER`. A record holds as much as its level: `losses` (loss, gradient norm,
hashes of the whole state), `gradients` (every gradient and weight), `modules` (every value that a micro-batch
computes). Values that only one record holds are not compared.

Bits are compared here. Two traces that may differ by rounding are compared by `compare_traces.py`, with sketches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.distributed.tensor_hashes import combined, measure_all
from lockstep_trace.coded import TraceError

# Kinds of values of a step, in the order of computation: the first that differs is reported. A trace has some of them,
# the record of a step others. `weights` and `optimizer` are hashes of the whole state.
ORDER = (
    "start weights",
    "scores",
    "examples",
    "inputs",
    "output",
    "loss",
    "output gradient",
    "leaf gradient",
    "gradient",
    "norm",
    "loss sum",
    "clipping",
    "learning rate",
    "update",
    "buffers",
    "weights",
    "optimizer",
)
FORMAT = 2


@dataclass(frozen=True)
class TensorPrint:
    """A tensor, or the tensors of one value. `hash`: 16 hexadecimal digits of bits, dtypes and shapes. `norm`: 2-norm,
    infinite or NaN if a number is."""

    hash: str
    norm: float


@dataclass(frozen=True)
class MicroBatchValue:
    """A value that a micro-batch computed on a rank. `kind`: of `ORDER`."""

    kind: str
    name: str  # of the module or parameter; empty for inputs and loss
    micro_batch: int
    print: TensorPrint
    rank: int = 0


@dataclass(frozen=True)
class StepRecord:
    """A step. None or empty: not recorded."""

    step: int
    loss: float | None = None  # None also if it is not finite: then `hash` tells such numbers apart
    grad_norm: float | None = None  # before clipping; None as above
    hash: str | None = None  # of the bits of loss and grad_norm
    weights: str | None = None  # hash of all weights after the step
    optimizer: str | None = None  # hash of the optimizer's state after it
    finite: bool | None = None  # whether all weights are, after it
    targets: tuple[float, float] | None = None  # of the step: (computed by the model, expected)
    rate: float | None = None  # learning rate
    examples: TensorPrint | None = None  # numbers of the rows
    before: Mapping[str, TensorPrint] = field(default_factory=dict)  # weights, buffers and optimizer state
    computed: tuple[MicroBatchValue, ...] = ()  # in the order of computation
    gradients: Mapping[str, TensorPrint] = field(default_factory=dict)  # of the step, before clipping
    after: Mapping[str, TensorPrint] = field(default_factory=dict)  # as `before`

    @classmethod
    def of_numbers(cls, step: int, loss: float, norm: float, **more: Any) -> StepRecord:
        """Return a record of these results."""
        digest = hashlib.blake2b(struct.pack("<dd", loss, norm), digest_size=8).hexdigest()
        finite = [value if math.isfinite(value) else None for value in (loss, norm)]  # JSON has no other numbers
        return cls(step, finite[0], finite[1], digest, **more)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, without what was not recorded. Loss and norm are null if not finite."""
        values = dataclasses.asdict(self)
        results = ("loss", "grad_norm") if self.hash is not None else ()
        return {k: v for k, v in values.items() if k == "step" or k in results or v not in (None, {}, ())}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StepRecord:
        """Read what `to_json` wrote; unknown keys are ignored."""
        known: dict[str, Any] = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
        for name in ("before", "gradients", "after"):
            known[name] = {n: TensorPrint(**each) for n, each in known.get(name, {}).items()}
        known["computed"] = tuple(
            MicroBatchValue(**{**each, "print": TensorPrint(**each["print"])}) for each in known.get("computed", ())
        )
        if known.get("examples"):
            known["examples"] = TensorPrint(**known["examples"])
        if known.get("targets"):
            known["targets"] = tuple(known["targets"])
        return cls(**known)

    def fault(self, skips: bool = False) -> str | None:
        """Return why this record alone is invalid, or None. `skips`: the run skips steps whose numbers are not finite,
        so they are normal."""
        if self.finite is False:
            return "some weights are not finite after the step"
        bad = [name for name, p in self.gradients.items() if not math.isfinite(p.norm)]
        bad += [name for name, p in self.after.items() if math.isnan(p.norm)]  # a mask may hold infinities
        if bad:
            return f"{bad[0]} is not finite"
        if self.hash is None:
            return None
        if self.loss is None or self.grad_norm is None:
            return None if skips else "loss or gradient norm is not finite"
        if not all(isinstance(each, int | float) for each in (self.loss, self.grad_norm)):
            return _CHANGED
        return None if StepRecord.of_numbers(0, self.loss, self.grad_norm).hash == self.hash else _CHANGED


_CHANGED = "the hash does not match loss and gradient norm: the line was changed after it was written"


def prints_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorPrint]:
    """Return the hash and norm of each tensor, in the same order. Synchronizes with the device."""
    measured = measure_all(list(tensors.values()))
    rows = zip(tensors.items(), measured, strict=True)
    return {n: TensorPrint(combined([("", t.dtype, t.shape, h)]), math.sqrt(sq)) for (n, t), (h, sq) in rows}


def print_of(*tensors: Tensor) -> TensorPrint:
    """Return the hash and norm of the tensors of one value. Synchronizes with the device."""
    measured = measure_all(tensors)
    rows = [("", t.dtype, t.shape, h) for t, (h, _) in zip(tensors, measured, strict=True)]
    return TensorPrint(combined(rows), math.sqrt(sum(square for _, square in measured)))


# -- files -------------------------------------------------------------------------------------------------------------


def write_records(path: Path, about: Mapping[str, Any], records: Iterable[StepRecord]) -> None:
    """Write records to a file: a line about all of them, then a line each. Errors: `OSError`."""
    lines = [{"format": FORMAT, **about}, *(record.to_json() for record in records)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_records(path: Path) -> tuple[dict[str, Any], list[StepRecord]]:
    """Read what `write_records` wrote. Errors: `OSError`; `TraceError` for another kind of file."""
    try:
        about, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] or [None]
    except ValueError:
        raise TraceError("LS9150", f"{path} is not a file of records: it has a line that is not JSON") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT or not lines:
        raise TraceError(
            "LS9151", f"{path} is not a file of step records, or was written by another version of lockstep"
        )
    try:
        return about, [StepRecord.from_json(line) for line in lines]
    except (TypeError, KeyError, AttributeError):
        raise TraceError("LS9152", f"{path} is damaged: a line is not a step record") from None


# -- comparison --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A difference of two records: the first value of its kind. `values`: of both, if they are numbers."""

    step: int
    kind: str  # of `ORDER`
    name: str = ""
    micro_batch: int | None = None
    values: tuple[float | None, float | None] | None = None
    more: int = 0  # further names of this kind that differ
    missing: str = ""  # "first" or "second": the record that lacks the value

    def __str__(self) -> str:
        of = "" if self.micro_batch is None else f"micro-batch {self.micro_batch}: "
        name = (self.name or "the model") + (f" and {self.more} more" if self.more else "")
        texts = {
            "start weights": f"weights before the step: {name}",
            "examples": "examples of the step",
            "inputs": "inputs of the model",
            "output": f"forward output of {name}",
            "loss": "loss",
            "output gradient": f"gradient of the output of {name}",
            "leaf gradient": f"gradient of {name}",
            "gradient": f"gradient of {name}, summed over micro-batches",
            "norm": "gradient norm",
            "loss sum": "loss, summed over micro-batches",
            "learning rate": "learning rate",
            "update": f"weights after the step: {name}",
            "weights": "the weights",
            "optimizer": "the optimizer's state",
        }
        return f"{of}{texts[self.kind]}"


def record_differences(a: StepRecord, b: StepRecord) -> list[Difference]:
    """Return the first difference of each kind, in the order of `ORDER`; for values of micro-batches, only one
    difference."""
    differing = [
        *_of_names("start weights", a.step, a.before, b.before, shared=True),
        *_of_prints("examples", a.step, a.examples, b.examples),
        *_of_computed(a, b),
        *_of_results(a, b),
        *_of_names("gradient", a.step, a.gradients, b.gradients),
        *_of_numbers("learning rate", a.step, a.rate, b.rate),
        *_of_names("update", a.step, a.after, b.after),
        *_of_prints("weights", a.step, a.weights, b.weights),
        *_of_prints("optimizer", a.step, a.optimizer, b.optimizer),
    ]
    return sorted(differing, key=lambda difference: ORDER.index(difference.kind))


def compare_records(a: Iterable[StepRecord], b: Iterable[StepRecord]) -> list[Difference]:
    """Return the differences of the first step that both recorded with different values, or an empty list."""
    there = {record.step: record for record in b}
    for record in sorted(a, key=lambda record: record.step):
        if record.step in there and (differing := record_differences(record, there[record.step])):
            return differing
    return []


def _of_prints(kind: str, step: int, one: Any, other: Any) -> Iterator[Difference]:
    if one is not None and other is not None and _bits(one) != _bits(other):
        yield Difference(step, kind)


def _of_numbers(kind: str, step: int, one: float | None, other: float | None) -> Iterator[Difference]:
    if one is not None and other is not None and one != other:
        yield Difference(step, kind, values=(one, other))


def _of_results(a: StepRecord, b: StepRecord) -> list[Difference]:
    if a.hash is None or b.hash is None:
        return []
    norms, losses = (a.grad_norm, b.grad_norm), (a.loss, b.loss)
    differing = [Difference(a.step, "norm", values=norms)] if norms[0] != norms[1] else []
    # with equal numbers: zeros of another sign, or numbers that are not finite
    if losses[0] != losses[1] or (not differing and a.hash != b.hash):
        kind = "loss sum" if a.computed and b.computed else "loss"
        differing.append(Difference(a.step, kind, values=losses))
    return differing


def _of_names(
    kind: str,
    step: int,
    one: Mapping[str, TensorPrint],
    other: Mapping[str, TensorPrint],
    shared: bool = False,
) -> Iterator[Difference]:
    if not one or not other:
        return
    if shared:
        names = [name for name in one if name in other]
        one, other = {n: one[n] for n in names}, {n: other[n] for n in names}
    if alone := [name for name in (*one, *other) if (name in one) != (name in other)]:
        yield Difference(step, kind, alone[0], more=len(alone) - 1, missing="second" if alone[0] in one else "first")
        return
    wrong = [name for name in one if one[name].hash != other[name].hash]
    if wrong:
        yield Difference(step, kind, wrong[0], more=len(wrong) - 1)


def _of_computed(a: StepRecord, b: StepRecord) -> Iterator[Difference]:
    there: dict[tuple[str, str, int], list[MicroBatchValue]] = {}
    for each in b.computed:
        there.setdefault((each.kind, each.name, each.micro_batch), []).append(each)
    kinds, counts = {each.kind for each in b.computed}, dict[tuple[str, str, int], int]()
    for each in a.computed:
        key = (each.kind, each.name, each.micro_batch)
        place = counts[key] = counts.get(key, 0) + 1
        others = there.get(key, [])
        lacks = len(others) < place and each.kind in kinds and each.kind in ("inputs", "loss")
        if lacks or (len(others) >= place and others[place - 1].print.hash != each.print.hash):
            yield Difference(a.step, each.kind, each.name, each.micro_batch, missing="second" if lacks else "")
            return


def _bits(value: TensorPrint | str) -> str:
    return value if isinstance(value, str) else value.hash


def factors_of(a: StepRecord, b: StepRecord) -> tuple[list[str], list[float]]:
    """Return the names of gradients that differ, and the ratio of their norms."""
    wrong = [n for n, p in a.gradients.items() if n in b.gradients and b.gradients[n].hash != p.hash]
    return wrong, [b.gradients[n].norm / a.gradients[n].norm for n in wrong if a.gradients[n].norm]


def by_step(records: Sequence[StepRecord]) -> dict[int, StepRecord]:
    """Return step -> record; of a repeated step the last one."""
    return {record.step: record for record in records}
