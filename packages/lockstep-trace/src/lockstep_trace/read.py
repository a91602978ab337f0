"""Reads a trace: the files of all ranks, complete or not.

In: the folder of a trace. Out: `Trace` with its ranks, and each rank's layouts, steps, epochs and evaluations. Ignores
lines truncated by a kill.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep_trace.coded import TraceError
from lockstep_trace.redaction import redact_words
from lockstep_trace.tracer import clipping_factor, width_of

ABOUT = "trace.json"
PATTERN = "rank-*.jsonl"


@dataclass(frozen=True)
class Value:
    """Summary of a tensor or shard: fingerprint (64 bits, unsigned), sum of squares, sketch [P] or None."""

    fingerprint: int
    square: float
    sketch: NDArray[np.float64] | None = None

    @property
    def norm(self) -> float:
        return float(np.sqrt(self.square)) if self.square >= 0 else float("nan")


@dataclass(frozen=True)
class Parameter:
    """A parameter in the optimizer of a rank. `offset`, `size`: the rank's block of the full `shape`."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    width: int
    dtype: str
    device: str
    group: int
    held: bool  # by a called model
    trained: bool
    partial: str

    @property
    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.offset, self.size

    @property
    def whole(self) -> bool:
        return self.size == self.shape


@dataclass(frozen=True)
class OptimizerLayout:
    """The parameters of a rank's optimizer, in its order."""

    optimizer: str
    parameters: tuple[Parameter, ...]
    ties: tuple[tuple[str, ...], ...]
    untied: bool
    mesh: Mapping[str, Any] | None
    models: tuple[str, ...]
    own: bool = False  # a class outside torch.optim
    thawed: tuple[tuple[str, int], ...] = ()  # frozen modules with an attribute `requires_grad` of True


@dataclass(frozen=True)
class Step:
    """The record of one optimizer step on a rank. Tensors are decoded on first access."""

    raw: Mapping[str, Any]
    layout: OptimizerLayout

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.raw.get(name)

    @property
    def measured(self) -> bool:
        return "weights" in self.raw

    @cached_property
    def grads(self) -> dict[str, Value]:
        """Name -> gradient as passed to the optimizer, without the loss scale. If only those before clipping were
        measured: these times the clipping's factor."""
        if self.raw.get("factor_of_clipping"):
            clip = self.raw["clips"][0]
            by = clipping_factor(clip["limit"], clip["norm"])
            return {n: _scaled(v, by) for n, v in self.unclipped.items()}
        if "grads" not in self.raw:
            return {}
        values = self._values("grads", self._present)
        if "unclipped" in self.raw and (pre := self._values("unclipped", self._present)):
            factor = {n: v.norm / pre[n].norm if pre[n].norm else 1.0 for n, v in values.items()}
            values = {n: Value(v.fingerprint, v.square, _times(pre[n].sketch, factor[n])) for n, v in values.items()}
        scale = self.raw.get("grad_scale")
        if scale:
            by = 1 / float(np.frombuffer(base64.b64decode(scale["fp"]), dtype="<f8")[0])
            values = {n: Value(v.fingerprint, v.square * by * by, _times(v.sketch, by)) for n, v in values.items()}
        return values

    @cached_property
    def unclipped(self) -> dict[str, Value]:
        """Name -> gradient before clipping; equals `grads` if nothing was clipped."""
        return self._values("unclipped", self._present) if "unclipped" in self.raw else self.grads

    @cached_property
    def arrived(self) -> dict[str, Value]:
        """Name -> gradient after the last backward, without sketches, where the script writes to gradients; at first
        steps."""
        return self._values("arrived", self._present, sketch=False)

    @cached_property
    def before(self) -> dict[str, Value]:
        return self._values("before", range(len(self.layout.parameters)), sketch=False)

    @cached_property
    def weights(self) -> dict[str, Value]:
        """Name -> weight after the step, without sketches."""
        return self._values("weights", range(len(self.layout.parameters)), sketch=False)

    @cached_property
    def updates(self) -> dict[str, Value]:
        """Name -> weight after the step minus weight before."""
        return self._values("updates", range(len(self.layout.parameters)))

    @cached_property
    def moments(self) -> dict[tuple[str, str], Value]:
        """(parameter, state) -> optimizer state."""
        keys = [(self.layout.parameters[i].name, name) for i, name in self.raw.get("moments_of", [])]
        widths = [0] * len(keys)
        return dict(zip(keys, decode(self.raw.get("moments"), widths), strict=False))

    @cached_property
    def buffers(self) -> dict[str, Value]:
        of = self.raw.get("buffers_of", [])
        values = decode(self.raw.get("buffers"), [width_of(shape) for _, shape, _ in of])
        return {name: value for (name, _, _), value in zip(of, values, strict=False)}

    @cached_property
    def modules(self) -> list[tuple[str, Value]]:
        return self._of_modules("modules")

    @cached_property
    def returned(self) -> list[tuple[str, Value]]:
        """(module, gradient of its output), in backward order."""
        return self._of_modules("returned")

    def _of_modules(self, kind: str) -> list[tuple[str, Value]]:
        of = self.raw.get(f"{kind}_of", [])
        values = decode(self.raw.get(kind), [width_of(shape) for _, shape in of])
        return [(name, value) for (name, _), value in zip(of, values, strict=False)]

    @property
    def _present(self) -> list[int]:
        absent = set(self.raw.get("none", ()))
        return [i for i in range(len(self.layout.parameters)) if i not in absent]

    def _values(self, name: str, which: Sequence[int], sketch: bool = True) -> dict[str, Value]:
        of = [self.layout.parameters[i] for i in which]
        values = decode(self.raw.get(name), [p.width if sketch else 0 for p in of])
        return {p.name: value for p, value in zip(of, values, strict=False)}


@dataclass
class Rank:
    """The records of one training process."""

    head: Mapping[str, Any]
    path: Path
    layouts: dict[int, OptimizerLayout] = field(default_factory=dict)
    starts: dict[int, tuple[OptimizerLayout, dict[str, Value]]] = field(default_factory=dict)  # by optimizer
    shards: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)  # content hash, whether constant
    steps: dict[int, dict[int, Step]] = field(default_factory=dict)  # by optimizer, by step
    models: list[Mapping[str, Any]] = field(default_factory=list)
    loaders: list[Mapping[str, Any]] = field(default_factory=list)  # started passes
    passed: list[Mapping[str, Any]] = field(default_factory=list)  # finished passes
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    scores: list[Mapping[str, Any]] = field(default_factory=list)  # returned by known evaluators
    selections: list[Mapping[str, Any]] = field(default_factory=list)  # by which score weights are chosen
    skipped: list[Mapping[str, Any]] = field(default_factory=list)
    errors: list[Mapping[str, Any]] = field(default_factory=list)
    noise: list[Mapping[str, Any]] = field(default_factory=list)  # dropout in evaluation mode
    loads: list[Mapping[str, Any]] = field(default_factory=list)  # loads of a model's own tensors into itself
    empty_loads: list[Mapping[str, Any]] = field(default_factory=list)  # loads of which no key was the model's
    facts: list[Mapping[str, Any]] = field(default_factory=list)  # `fact` and `argument`, each written once
    workers: list[Mapping[str, Any]] = field(default_factory=list)  # data loader workers
    checks: list[Mapping[str, Any]] = field(default_factory=list)  # recomputed steps
    check_updates: list[Mapping[str, Any]] = field(default_factory=list)
    operations: list[Mapping[str, Any]] = field(default_factory=list)  # of one step, at the level `operations`
    ended: Mapping[str, Any] | None = None

    @property
    def number(self) -> int:
        return int(self.head["rank"])


@dataclass(frozen=True)
class Trace:
    """A trace: all ranks of a command, in order."""

    folder: Path
    about: Mapping[str, Any]
    ranks: tuple[Rank, ...]
    others: int  # training processes not in `ranks`: another job of the command

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def optimizers(self) -> list[int]:
        return sorted({number for rank in self.ranks for number in rank.steps})

    def steps(self, optimizer: int) -> list[int]:
        """Return the steps recorded by all ranks that use the optimizer."""
        sets = [set(rank.steps[optimizer]) for rank in self.ranks if optimizer in rank.steps]
        return sorted(set.intersection(*sets)) if sets else []

    @property
    def complete(self) -> bool:
        """Whether all ranks ended normally and every step is recorded."""
        return not self.about.get("steps") and all(
            rank.ended is not None and all(n <= len(rank.steps.get(o, {})) for o, n in enumerate(rank.ended["steps"]))
            for rank in self.ranks
        )

    def measured(self, optimizer: int) -> list[int]:
        """Return the steps in which every rank measured tensors."""
        return [s for s in self.steps(optimizer) if all(r.measured for _, r in self.at(optimizer, s))]

    def at(self, optimizer: int, step: int) -> list[tuple[Rank, Step]]:
        records = [(rank, rank.steps.get(optimizer, {}).get(step)) for rank in self.ranks]
        return [(rank, s) for rank, s in records if s is not None]


def is_trace(folder: Path) -> bool:
    """Return whether a folder holds a trace, recorded by the command or from within a script."""
    return (
        folder.is_dir()
        and ((folder / ABOUT).is_file() or any(folder.glob(PATTERN)))
        and not (folder / "run.yaml").exists()
    )


def about(folder: Path) -> dict[str, Any]:
    """Read `trace.json`: the command and its exit status; empty if the trace was recorded without the command."""
    path = folder / ABOUT
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return values


def read(folder: Path) -> Trace:
    """Read the trace in a folder. Errors: `TraceError` if there is none, or one without optimizer steps."""
    if not is_trace(folder):
        raise TraceError("LS9020", f"{folder} is not a trace; `lockstep trace -o {folder} -- COMMAND` makes one")
    command = about(folder)
    ranks = [rank for path in sorted(folder.glob(PATTERN)) if (rank := _rank(path)) is not None]
    trained = [rank for rank in ranks if rank.steps]
    if not trained:
        raise TraceError("LS9021", f"{folder}: no optimizer step was seen. {_why_none(command, ranks)}")
    world = max(int(rank.head["world"]) for rank in trained)
    same = [rank for rank in trained if int(rank.head["world"]) == world]
    last: dict[int, Rank] = {}
    for rank in sorted(
        same, key=lambda r: (_count(r), r.head["time"])
    ):  # of a rank that was restarted, the one with the longest record
        last[rank.number] = rank
    chosen = tuple(last[number] for number in sorted(last))
    for rank in (r for r in ranks if not r.steps and r.number in last):  # data loader workers have their own files
        last[rank.number].workers += rank.workers
    return Trace(folder, command, chosen, len(trained) - len(chosen))


def _count(rank: Rank) -> int:
    return sum(len(steps) for steps in rank.steps.values())


def _why_none(about: Mapping[str, Any], ranks: Sequence[Rank]) -> str:
    command = " ".join(redact_words(about.get("command") or [])) or "the command"
    skipped = sum(len(rank.skipped) for rank in ranks)
    if skipped:
        return (
            f"{command}: a GradScaler skipped all {skipped} steps: the gradients of each are not finite. Look at the "
            "loss and at its gradient (torch.autograd.set_detect_anomaly names the operation)"
        )
    if status := about.get("status"):
        return f"{command} ended with status {status} before an optimizer made a step: see its output"
    if ranks:
        return f"{command} used torch, but no torch optimizer made a step"
    return f"{command} trained nothing, or its Python ignores PYTHONPATH (python -I or -E), or it does not use torch"


def _rank(path: Path) -> Rank | None:
    rank: Rank | None = None
    for record in _records(path):
        kind = record["kind"]
        if kind == "process" and rank is None:
            rank = Rank(record, path)
        elif rank is not None:
            _take(rank, kind, record)
    return rank


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # truncated
                continue
            if isinstance(record, dict) and "kind" in record:
                yield record


def _take(rank: Rank, kind: str, record: Mapping[str, Any]) -> None:
    if kind == "layout":
        rank.layouts[record["id"]] = _layout(record)
    elif kind == "start":
        layout = rank.layouts[record["layout"]]
        values = decode(record["weights"], [p.width for p in layout.parameters])
        named = {p.name: v for p, v in zip(layout.parameters, values, strict=True)}
        rank.starts.setdefault(record["opt"], (layout, named))
        if shards := record.get("shards"):
            contents = decode(shards["content"], [])
            names = [layout.parameters[i].name for i in shards["of"]]
            pairs = zip(names, contents, contents[len(names) :], strict=False)
            rank.shards.setdefault(
                record["opt"], {n: (v.fingerprint, v.fingerprint == r.fingerprint) for n, v, r in pairs}
            )
    elif kind == "step":
        at = sum(map(len, rank.steps.values()))  # position among all optimizers' steps
        step = Step({**record, "at": at}, rank.layouts[record["layout"]])
        rank.steps.setdefault(record["opt"], {})[record["step"]] = step
    elif kind == "end":
        rank.ended = record
    else:
        lists = {
            "model": rank.models,
            "epoch": rank.loaders,
            "epoch end": rank.passed,
            "evaluation": rank.evaluations,
            "scores": rank.scores,
            "selection": rank.selections,
            "skipped": rank.skipped,
            "error": rank.errors,
            "worker": rank.workers,
            "noise": rank.noise,
            "self load": rank.loads,
            "empty load": rank.empty_loads,
            "fact": rank.facts,
            "check": rank.checks,
            "check update": rank.check_updates,
            "operations": rank.operations,
        }
        lists.get(kind, []).append(record)


def _layout(record: Mapping[str, Any]) -> OptimizerLayout:
    rows: list[dict[str, Any]] = [
        {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()} for row in record["parameters"]
    ]
    parameters = tuple(Parameter(**row) for row in rows)
    ties = tuple(tuple(names) for names in record["ties"])
    return OptimizerLayout(
        record["optimizer"],
        parameters,
        ties,
        record["untied"],
        record["mesh"],
        tuple(record["models"]),
        bool(record.get("own")),
        tuple((name, count) for name, count in record.get("thawed", ())),
    )


def decode(packed: Mapping[str, str] | None, widths: Sequence[int]) -> list[Value]:
    """Decode the values that `packed` of records.py encoded. `widths`: lengths of the sketches, if any."""
    if not packed or not packed["fp"]:
        return []
    prints = np.frombuffer(base64.b64decode(packed["fp"]), dtype="<u8")
    squares = np.frombuffer(base64.b64decode(packed["sq"]), dtype="<f8")
    if not packed["sk"] or not any(widths):
        return [Value(int(p), float(s)) for p, s in zip(prints, squares, strict=True)]
    sketches = np.frombuffer(base64.b64decode(packed["sk"]), dtype="<f4").astype(np.float64)
    parts = np.split(sketches, np.cumsum(widths)[:-1])
    return [Value(int(p), float(s), k) for p, s, k in zip(prints, squares, parts, strict=True)]


def _scaled(value: Value, factor: float) -> Value:
    if factor == 1.0:
        return value
    bits = int.from_bytes(np.float64(factor).tobytes(), "little")
    fingerprint = value.fingerprint * (bits * 0x9E3779B97F4A7C15 | 1) & (1 << 64) - 1
    return Value(fingerprint, value.square * factor * factor, _times(value.sketch, factor))


def _times(sketch: NDArray[np.float64] | None, by: float) -> NDArray[np.float64] | None:
    return None if sketch is None else sketch * by
