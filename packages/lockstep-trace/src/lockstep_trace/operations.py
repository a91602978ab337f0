"""Compares the operations of one step of two traces (`--level operations`) and names the first that differs.

In: two traces. Out: lines for the user. Operations are paired by name, module and phase, in order; operations of
one side alone are reported but not compared. Values are equal if their bits are.
"""

from __future__ import annotations

import base64
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

from lockstep_trace.coded import coded
from lockstep_trace.ranks import difference
from lockstep_trace.read import Trace, Value, decode
from lockstep_trace.redaction import redact_words

BUCKETS = 16  # of a sketch: tracer/operations.py
MADE_BY_OPERATIONS = ("loss", "gradient", "clipping", "update", "buffers")  # first differences that operations explain
ROUNDING = 1e-4  # relative difference beyond the rounding of one operation
GROWTH = 10.0  # an operation that multiplies the difference of its inputs by more is named
ALIKE = 0.5  # share of operations paired with one of the same shapes
MOST = 20_000  # operations that are paired out of order
NAMES = 3  # operations listed


@dataclass(frozen=True)
class Operation:
    """One recorded operation. `raw`: of tracer/operations.py."""

    number: int
    raw: Mapping[str, Any]
    forward: Operation | None  # of an operation of backward

    @property
    def name(self) -> str:
        return str(self.raw["op"]).removeprefix("aten.").removesuffix(".default")

    @property
    def key(self) -> tuple[str, str, str]:
        return self.raw["op"], self.raw["module"], self.raw["phase"]

    @property
    def exact_key(self) -> tuple[str, ...]:
        """`key` with shapes and dtypes."""
        return *self.key, *self.raw["shapes"][0], "", *self.raw["shapes"][1]

    @property
    def collective(self) -> bool:
        return self.raw["op"].startswith(("c10d.", "_c10d_functional."))

    @property
    def line(self) -> str:
        """The user's line that called it; for backward that of its forward operation."""
        own = self.raw["line"] or (self.forward.line if self.forward else None)
        return own or self.raw["library"] or self.raw.get("started") or "an unknown line"

    @property
    def library(self) -> str | None:
        library: str | None = self.raw["library"] or (self.forward.library if self.forward else None)
        return library

    def where(self) -> str:
        """Return the operation, its module and its line."""
        module = f" in {self.raw['module']}" if self.raw["module"] else ""
        phase = {"no grad": "without gradients"}.get(self.raw["phase"], self.raw["phase"])
        of = ""
        if self.forward is not None:
            of = f", backward of {self.forward.name}"
        elif self.raw.get("parameter"):
            of = f", gradient of {self.raw['parameter']}"
        inner = self.library
        inside = f" (inside, {inner})" if inner and inner != self.line else ""
        return f"{self.name}{module} ({phase}{of}), {self.line}{inside}"


Pair = tuple[Operation, Operation]
Alone = tuple[list[Operation], list[Operation]]


@dataclass(frozen=True)
class StepOperations:
    """The operations of one rank's step."""

    rank: int
    raw: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.raw["step"])

    @cached_property
    def operations(self) -> list[Operation]:
        rows: list[Operation] = []
        for number, raw in enumerate(self.raw["operations"]):
            at = raw.get("forward")
            rows.append(Operation(number, raw, rows[at] if at is not None and at < number else None))
        return rows

    @cached_property
    def values(self) -> list[Value]:
        packed = self.raw["values"]
        return decode(packed, [BUCKETS] * (len(base64.b64decode(packed["fp"])) // 8))

    def value(self, index: int) -> Value | None:
        return self.values[index] if index >= 0 else None


def recorded(trace: Trace) -> dict[int, StepOperations]:
    """Return rank -> its recorded operations; empty without the level `operations`."""
    return {rank.number: StepOperations(rank.number, rank.operations[-1]) for rank in trace.ranks if rank.operations}


# -- what is said after `record` -------------------------------------------------------------------------------------


def summary_lines(trace: Trace) -> list[str]:
    """Describe what was recorded at the level `operations`; nothing at other levels."""
    if trace.about.get("level") != "operations" and not any(rank.operations for rank in trace.ranks):
        return []
    chosen = trace.about.get("step") or 0
    missing = [rank for rank in trace.ranks if not rank.operations]
    if missing:
        steps = len(missing[0].steps.get(0, {}))
        text = (
            f"rank {missing[0].number}: no operations were recorded for step {chosen} of {steps}; give another --step"
        )
        return [coded("LS9180", text)]
    each = recorded(trace)
    first = each[min(each)]
    ranks = f" on each of {len(each)} ranks" if len(each) > 1 else ""
    lines = [f"{len(first.operations)} operations of step {first.step}{ranks}"]
    return lines + _notes(first, "")


def _notes(step: StepOperations, where: str) -> list[str]:
    lines = []
    if step.raw["left_out"]:
        lines.append(f"{where}the step has {step.raw['left_out']} operations more, which were not recorded")
    if step.raw.get("unfinished"):
        lines.append(f"{where}the process ended within step {step.step}")
    if step.raw["regions"] or step.raw["unseen"]:
        names = ", ".join(list(step.raw["regions"])[:NAMES]) or "compiled code"
        text = f"{where}operations inside of compiled code ({names}) are not recorded"
        lines.append(f"{text}; TORCH_COMPILE_DISABLE=1 in the environment runs it uncompiled")
    return lines


# -- comparison ------------------------------------------------------------------------------------------------------


def comparison_lines(a: Trace, b: Trace) -> list[str]:
    """Name the first operation that differs between two traces with operations of the same step. Empty if neither has
    any."""
    one, other = recorded(a), recorded(b)
    if not one and not other:
        return []
    if not one or not other:
        folder = (b if one else a).folder
        return [coded("LS9181", f"operations: not compared: {folder} has none; record it with --level operations, too")]
    steps = {s.step for s in one.values()}, {s.step for s in other.values()}
    if steps[0] != steps[1]:
        x, y = min(steps[0]), min(steps[1])
        text = f"operations: not compared: they are of step {x} in the reference and of step {y} here; give one --step"
        return [coded("LS9182", text)]
    lines = []
    if sorted(one) != sorted(other):
        lines.append(f"operations are compared on rank 0 alone: {len(one)} and {len(other)} ranks have recorded them")
    shared = [r for r in sorted(one) if r in other][: 1 if sorted(one) != sorted(other) else None]
    verdicts = [_Verdict(one[r], other[r], len(shared) > 1) for r in shared]
    verdict = next((v for v in verdicts if v.culprit and not v.of_collective), None) or next(
        (v for v in verdicts if v.culprit), verdicts[0]
    )
    lines += verdict.lines()
    for step, where in ((one[verdict.a.rank], "in the reference, "), (other[verdict.a.rank], "here, ")):
        lines += _notes(step, where)
    return lines


class _Verdict:
    """The first difference of one rank's operations."""

    def __init__(self, a: StepOperations, b: StepOperations, named: bool) -> None:
        self.a, self.b, self.named = a, b, named
        self.culprit: Pair | None = None
        self.aligned = list(aligned(a.operations, b.operations))
        self.gap: Alone | None = None  # the cause of other inputs
        self.alone: list[Alone] = []  # up to the culprit
        self.kind = ""
        self._find()

    @property
    def of_collective(self) -> bool:
        return self.culprit is not None and self.culprit[1].collective and self.kind == "outputs"

    def _find(self) -> None:
        for pairs, alone in self.aligned:
            if any(alone):
                self.alone.append(alone)
            for x, y in pairs:
                self.kind = self._differs(x, y)
                if self.kind:
                    self.culprit = (x, y)
                    self.gap = None if self.kind == "outputs" else self._cause(x, y)
                    return

    def _cause(self, x: Operation, y: Operation) -> Alone | None:
        for side, operation in ((0, x), (1, y)):
            makers = {of for of in operation.raw["of"] if isinstance(of, int)}
            for alone in self.alone:
                if makers & {o.number for o in alone[side]}:
                    return alone
        last = self.alone[-1] if self.alone else ([], [])
        ends = [rows[-1].number + 1 if rows else None for rows in last]
        return last if x.number == ends[0] or y.number == ends[1] else None

    def _differs(self, x: Operation, y: Operation) -> str:
        if x.raw["shapes"] != y.raw["shapes"]:
            return "shapes"
        if not self._equal(x, y, "out"):
            return "outputs" if self._equal(x, y, "in") else "inputs"
        return ""

    def _equal(self, x: Operation, y: Operation, side: str) -> bool:
        pairs = zip(x.raw[side], y.raw[side], strict=False)
        return all(self._distance(i, j) in (0.0, None) for i, j in pairs)

    def _distance(self, i: int, j: int) -> float | None:
        u, v = self.a.value(i), self.b.value(j)
        if u is None or v is None:
            return None
        distance = difference(u, v)
        return math.inf if distance is None or math.isnan(distance) else distance

    # -- in words ----------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        rank = f" on rank {self.a.rank}" if self.named else ""
        head = f"operations of step {self.a.step}{rank}: "
        if self.culprit is None:
            return [head + self._nothing(), *self._gaps()]
        x, y = self.culprit
        if self.gap is not None:
            return [
                head + "from here on, the operations differ:",
                *self._of_gap(self.gap),
                *self._beyond(y, "in"),
            ]
        what = {
            "outputs": "the first whose outputs differ, though its inputs are equal",
            "inputs": "the first that differs; its inputs differ already, and no operation of the step made them",
            "shapes": "the first that differs: its inputs have other shapes or dtypes",
        }[self.kind]
        lines = [f"{head}{what}:", f"  {x.where()} in the reference, number {x.number}"]
        lines.append(f"  {y.where()} here, number {y.number}")
        lines += [f"  {line}" for line in self._why(x, y)]
        return [*lines, *self._gaps(), *(self._beyond(y, "out") if self.kind == "outputs" else ())]

    def _nothing(self) -> str:
        count = len(self.b.operations)
        if not self.alone:
            return f"all {count} have equal outputs, bit for bit"
        return "all operations that both ran have equal outputs, bit for bit"

    def _of_gap(self, gap: Alone) -> list[str]:
        lines = []
        for side, rows in zip(("in the reference", "here"), gap, strict=True):
            first = rows[0].where() if rows else "nothing"
            names = ", ".join(o.name for o in rows[:NAMES]) + (", ..." if len(rows) > NAMES else "")
            lines.append(f"  {side}: {first}" + (f"; {len(rows)} operations: {names}" if len(rows) > 1 else ""))
        x, y = self.culprit or (None, None)
        if y is not None:
            lines.append(f"  after them, {y.where()} has other inputs ({self._by(x, y, 'in')})")
        return lines

    def _gaps(self) -> list[str]:
        counts = [sum(len(gap[side]) for gap in self.alone) for side in (0, 1)]
        if not any(counts):
            return []
        text = (
            f"  {counts[0]} operations occur only in the reference and {counts[1]} only here, without changing a result"
        )
        lines = [f"{text}; the first:"]
        for side, rows in zip(("in the reference", "here"), self.alone[0], strict=True):
            lines.append(f"    {side}: {rows[0].where() if rows else 'nothing'}")
        return lines

    def _why(self, x: Operation, y: Operation) -> Iterator[str]:
        if self.kind == "shapes":
            yield f"in the reference {_shapes(x)}, here {_shapes(y)}"
            return
        if self.kind == "inputs":
            yield from self._sources(x, y)
            return
        yield f"its output differs by {self._by(x, y, 'out')}"
        names = list(dict.fromkeys([*x.raw["args"], *y.raw["args"]]))
        other = [n for n in names if x.raw["args"].get(n) != y.raw["args"].get(n)]
        if other:
            yield from (
                f"{name}: {x.raw['args'].get(name)} in the reference, {y.raw['args'].get(name)} here" for name in other
            )
        elif y.collective:
            yield "this rank sends equal values: another rank sends other values, or the order of the sum differs"
        elif y.raw.get("random"):
            yield "it draws random numbers: the generator was seeded differently, or other code drew from it before"
        elif self.a.raw["threads"] != self.b.raw["threads"]:
            yield (
                f"its arguments are equal: {self.a.raw['threads']} threads in the reference, "
                f"{self.b.raw['threads']} here, which sum in another order"
            )
        elif y.name.startswith("compiled region"):
            yield "the compiled code or its weights differ; TORCH_COMPILE_DISABLE=1 shows its operations"
        else:
            yield "its arguments are equal: the kernel, memory layout, library or processor differs"

    def _sources(self, x: Operation, y: Operation) -> Iterator[str]:
        for at, (i, j) in enumerate(zip(x.raw["in"], y.raw["in"], strict=False)):
            distance = self._distance(i, j)
            if distance in (0.0, None):
                continue
            of = y.raw["of"][at]
            if isinstance(of, int):
                source = f"computed here by {self.b.operations[of].where()}"
            elif isinstance(of, str):
                source = f"the weight {of}, which differs before the step"
            else:
                source = "computed before the step, or read from the data"
            yield f"input {at}, {y.raw['shapes'][0][at]}, differs by {_number(distance)}: {source}"

    def _by(self, x: Operation | None, y: Operation, side: str) -> str:
        if x is None:
            return "not compared"
        pairs = zip(x.raw[side], y.raw[side], strict=False)
        return _number(max((d for i, j in pairs if (d := self._distance(i, j)) is not None), default=None))

    def _beyond(self, culprit: Operation, side: str) -> list[str]:
        x, y = self.culprit  # type: ignore[misc]
        if self._largest(x, y, side) > ROUNDING:
            return []
        later = (pair for pairs, _ in self.aligned for pair in pairs if pair[1].number > culprit.number)
        for one, other in later:
            out, into = (self._largest(one, other, side) for side in ("out", "in"))
            if one.raw["shapes"] == other.raw["shapes"] and out > max(ROUNDING, GROWTH * into):
                text = f"that is rounding; the first operation that amplifies it is {other.where()}"
                return [f"  {text}: {_number(into)} before it, {_number(out)} after it"]
        return ["  that is rounding, and no later operation amplifies it much"]

    def _largest(self, x: Operation, y: Operation, side: str) -> float:
        pairs = zip(x.raw[side], y.raw[side], strict=False)
        return max((d for i, j in pairs if (d := self._distance(i, j)) is not None), default=0.0)


def aligned(a: Sequence[Operation], b: Sequence[Operation]) -> Iterator[tuple[list[Pair], Alone]]:
    """Yield runs of operations with equal names, modules and phases as pairs, in order, or what one side does alone:
    (pairs, (operations of `a`, operations of `b`)), one of them empty."""
    begin = 0
    while begin < min(len(a), len(b)) and a[begin].key == b[begin].key:
        begin += 1
    yield list(zip(a[:begin], b[:begin], strict=True)), ([], [])
    rest = list(a[begin:]), list(b[begin:])
    if max(map(len, rest)) > MOST:
        yield [], rest
        return
    matcher = _matched([[o.exact_key for o in side] for side in rest])
    if matcher.ratio() < ALIKE:  # batches of other sizes
        matcher = _matched([[o.key for o in side] for side in rest])
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            yield list(zip(rest[0][i:i_end], rest[1][j:j_end], strict=True)), ([], [])
        else:
            yield [], (rest[0][i:i_end], rest[1][j:j_end])


def _matched(keys: list[list[tuple[str, ...]]]) -> SequenceMatcher[int]:
    numbers: dict[tuple[str, ...], int] = {}
    one, other = ([numbers.setdefault(key, len(numbers)) for key in side] for side in keys)
    return SequenceMatcher(None, one, other, autojunk=False)


def _shapes(operation: Operation) -> str:
    into, out = operation.raw["shapes"]
    return f"({', '.join(into)}) -> ({', '.join(out)})"


def _number(distance: float | None) -> str:
    if distance is None:
        return "an unknown amount"
    return "a non-finite amount" if math.isinf(distance) else f"{distance:.2g} of its size"


# -- advice ------------------------------------------------------------------------------------------------


def advice(a: Trace, b: Trace, step: int) -> list[str]:
    """Return the two commands that record the operations of a step in which two traces differ."""
    lines = [f"to see the first operation that differs, record step {step} of both, and compare again:"]
    for trace in (a, b):
        words = redact_words(trace.about.get("command") or [])
        command = " ".join(_quoted(word) for word in words) or "COMMAND"
        folder = _quoted(str(trace.folder))
        lines.append(f"  lockstep-trace record --level operations --step {step} -o {folder} -- {command}")
    return lines


def _quoted(word: str) -> str:
    return word if "***" in word else shlex.quote(word)
