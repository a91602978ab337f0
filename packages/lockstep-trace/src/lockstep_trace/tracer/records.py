"""Collects state between two steps, measures an optimizer's tensors at a step, and writes records to the file of a
traced process: one JSON value per line, flushed at once, so that a kill loses nothing written.

In: parameters, optimizer state, modules, a `Since`. Out: vectors of `fingerprint.measure`, on the tensors' devices:
gradients and weights before a step; weights, changes, moments and buffers after it; `rank-RRRRR-HOST-PID.jsonl` in the
trace's folder. Numbers are copied from the device in one asynchronous copy and written at the next step.
"""

from __future__ import annotations

import base64
import ctypes
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import BEGAN, fingerprint, placement
from .fingerprint import Block, heads, measure, subtracted, whole
from .gradient_history import local_shape, written
from .graph import LossFunction
from .inputs import TOKENS, CallInputs
from .layouts import SketchedLayout, nested
from .logits import SEEN


@dataclass
class Since:
    """Events since the last optimizer step."""

    inputs: list[CallInputs] = field(default_factory=list)
    losses: list[tuple[Tensor, bool]] = field(default_factory=list)  # (value, whether scaled)
    backwards: int = 0
    cleared: int = 0  # backwards whose gradients were cleared before the next one
    arrived: dict[Any, Tensor] = field(default_factory=dict)  # gradients after the last backward, measured
    nonfinite: Tensor | None = None  # `Recorder._nonfinite`
    bare: list[tuple[str, list[int], Tensor]] = field(default_factory=list)  # `Strays.bare`
    attention: list[Tensor] = field(default_factory=list)  # `attention.SEEN`
    twice: list[Any] = field(default_factory=list)  # weak reference to the last loss, if its whole gradient was taken
    born: list[str] = field(default_factory=list)  # classes of layers made in a forward that a loss depends on
    alike: dict[str, Tensor] = field(default_factory=dict)  # `units_alike`
    sequences: list[list[Any]] = field(default_factory=list)  # `sequence_shape`, rows of the call, loader pass
    averages: list[tuple[str, Tensor]] = field(default_factory=list)  # `Averages.measured`
    ratios: list[Tensor] = field(default_factory=list)  # `ratios_all_one`
    ranges: list[Tensor] = field(default_factory=list)  # `inputs.ranges`
    drawn: list[int] = field(default_factory=list)  # states of the generator at the first forward and backward
    parts: list[Tensor] = field(default_factory=list)  # `inputs.hashes_of_inputs`
    noted: list[tuple[Any, Tensor]] = field(default_factory=list)  # notes on a loss, and whether they hold
    observed: list[tuple[str, str]] = field(default_factory=list)  # (kind, argument) of `notes_on`
    summed: dict[int, Tensor] = field(default_factory=dict)  # results of all_reduce by address, at first steps
    means: int = 0  # backwards of a mean that nothing divides
    inputs_at: list[int] = field(default_factory=list)  # number of inputs at each backward
    clips: list[dict[str, Any]] = field(default_factory=list)
    norms: list[tuple[dict[str, Any], Tensor]] = field(default_factory=list)  # (clip, norm before it)
    clipped: dict[int, Tensor] = field(default_factory=dict)  # id of parameter -> measured before clipping
    notes: list[str] = field(default_factory=list)
    scale: Tensor | None = None
    unscaled: bool = False
    training: bool | None = None
    mode: dict[str, Any] | None = None  # modules in training mode, at the first forward
    fed: list[tuple[str | None, int]] = field(default_factory=list)  # (loader pass, batch number) of each input
    objectives: list[LossFunction] = field(default_factory=list)
    rewritten: bool = False  # gradients were modified after backward, other than by clipping
    reduced_late: int = 0  # all-reduces of gradients after the step that used them, which were cleared then
    seeds: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)  # (value, state) of the last one
    collectives: dict[str, list[int]] = field(default_factory=dict)  # name -> [calls, elements]
    stale_casts: list[str] = field(default_factory=list)  # modules whose autocast casts predate the last step
    cut: bool = False  # a reentrant checkpoint computes no gradients
    evaluated: bool = False  # the model whose parameters are optimized was called without gradients
    evaluated_at: dict[int, tuple[int, int]] = field(default_factory=dict)  # (version, address) then, by id
    loaded: str = ""  # a model loaded a state_dict: "before" an evaluation, or "after"
    unmasked: bool | None = None  # packed rows without an attention mask
    autocast: str | None = None  # autocast dtype, "" if off
    modules: list[tuple[str, Tensor, tuple[int, ...]]] = field(default_factory=list)  # outputs, in forward order
    returned: list[tuple[str, Tensor, tuple[int, ...]]] = field(default_factory=list)  # their gradients, likewise


def packed(vectors: list[Tensor]) -> dict[str, str]:
    """Pack fingerprints (int64), sums of squares (float64) and sketches (float32), each concatenated, in base64."""
    if not vectors:
        return {"fp": "", "sq": "", "sk": ""}
    vectors = [v if v.numel() > 1 else torch.cat([v, v]) for v in vectors]
    if len({v.numel() for v in vectors}) == 1:  # the usual case: saves 600 operations for 300 tensors
        joined = torch.stack(vectors)
        fingerprints, squares, sketches = joined[:, 0], joined[:, 1], joined[:, 2:].reshape(-1)
    else:
        pairs = torch.stack([v[:2] for v in vectors])
        fingerprints, squares, sketches = pairs[:, 0], pairs[:, 1], torch.cat([v[2:] for v in vectors])
    return {
        "fp": blob(fingerprints),
        "sq": blob(squares),
        "sk": blob(sketches.view(torch.float64).float()) if sketches.numel() else "",
    }


def hexed(hashes: list[Tensor]) -> list[str]:
    if not hashes:
        return []
    numbers = torch.cat([h.to("cpu") for h in hashes]).numpy().astype(">i8").tobytes().hex()
    return [numbers[i : i + 16] for i in range(0, len(numbers), 16)]


OF_STEP = (  # of `numbers_of`
    "examples",
    "unlabelled",
    "targets",
    "restarts",
    "tokens",
    "objectives",
    "classes",
    "attention",
    "parts",
    "bare",
    "alike",
    "averages",
    "ratios",
    "noted",
    "ranges",
    "losses",
    "scale",
    "norms",
    "options",
)


def numbers_of(since: Since, groups: list[dict[str, Any]]) -> dict[str, list[Tensor]]:
    """Return the collected tensors that may be on a device. `fill_in` reads them one step later."""
    return {
        "examples": [s.hashes for s in since.inputs],
        "unlabelled": [s.unlabelled for s in since.inputs if s.unlabelled is not None],
        "targets": [s.targets.reshape(1) for s in since.inputs if s.targets is not None],
        "restarts": [s.restarts.reshape(1) for s in since.inputs if s.restarts is not None],
        "tokens": [s.tokens for s in since.inputs if s.tokens is not None],
        "objectives": [o.targets for o in since.objectives if o.targets is not None],
        "classes": [o.classes for o in since.objectives if o.classes is not None],
        "attention": since.attention,
        "parts": since.parts,
        "bare": [changed for _, _, changed in since.bare],
        "alike": list(since.alike.values()),
        "averages": [numbers.view(torch.int64) for _, numbers in since.averages],
        "ratios": since.ratios,
        "noted": [holds.reshape(1).long() for _, holds in since.noted],
        "ranges": [numbers.view(torch.int64) for numbers in since.ranges],
        "losses": [bits_of(value) for value, _ in since.losses],
        "scale": [] if since.scale is None else [bits_of(since.scale)],
        "norms": [bits_of(norm) for _, norm in since.norms],
        "options": [bits_of(v) for group in groups for v in group.values() if isinstance(v, Tensor)],
    }


def fill_in(record: dict[str, Any], since: Since, numbers: dict[str, list[Tensor]]) -> None:
    """Add the values of `numbers_of` to a step's record."""
    scale = record["scale"] = next((number_of(v) for v in numbers["scale"]), None)
    record["examples"] = hexed(numbers["examples"])
    if len(numbers["unlabelled"]) == len(since.inputs):
        record["unlabelled"] = hexed(numbers["unlabelled"])
    record["restarts"] = sum(int(n) for n in numbers["restarts"])
    if numbers["tokens"]:
        record["tokens"] = [dict(zip(TOKENS, n.tolist(), strict=True)) for n in numbers["tokens"]]
    record["parts"] = [n.tolist() for n in numbers["parts"]]
    if numbers["attention"]:
        record["attention"] = [dict(zip(SEEN, n.tolist(), strict=True)) for n in numbers["attention"]]
    hashed = iter(numbers["objectives"])
    classes = iter(numbers["classes"])
    if numbers["bare"]:
        rows = zip(since.bare, numbers["bare"], strict=True)
        record["bare"] = [[where, shape, bool(changed)] for (where, shape, _), changed in rows]
    for name, pair in zip([n for n, _ in since.averages], numbers["averages"], strict=True):
        record.setdefault("averages", []).append([name, *pair.view(torch.float64).tolist()])
    if numbers["ratios"]:
        record["ratios"] = [bool(n) for n in numbers["ratios"]]
    for (note, _), n in zip(since.noted, numbers["noted"], strict=True):
        if bool(n):
            record["observed" if isinstance(note, tuple) else "notes"].append(note)
    if numbers["ranges"]:
        record["ranges"] = [n.view(torch.float64).tolist() for n in numbers["ranges"]]
    if numbers["alike"]:
        record["alike"] = [name for name, n in zip(since.alike, numbers["alike"], strict=True) if bool(n)]
    record["objectives"] = [
        o.about | _targets(o, hashed) | ({} if o.classes is None else {"classes": next(classes).tolist()})
        for o in since.objectives
    ]
    record["micro"] = [len(s.hashes) for s in since.inputs]
    targets = iter(numbers["targets"])
    record["targets"] = [None if s.targets is None else int(next(targets)) for s in since.inputs]
    values = zip(numbers["losses"], since.losses, strict=True)
    record["losses"] = [[number_of(v), scale if scaled else None] for v, (_, scaled) in values]
    for (clip, _), norm in zip(since.norms, numbers["norms"], strict=True):
        clip["norm"] = number_of(norm)
    for clip in since.clips:
        if scale == 1.0:
            clip.pop("scaled", None)
    options = iter(numbers["options"])
    for group in record["groups"]:
        group |= {name: number_of(next(options)) for name, v in group.items() if isinstance(v, Tensor)}


def _targets(objective: LossFunction, numbers: Iterator[Tensor]) -> dict[str, Any]:
    if objective.targets is None:
        return {}
    count, one, other, equal, diagonal, weight, weights = next(numbers).tolist()
    marks: dict[str, Any] = {name: True for name, value in (("equal", equal), ("diagonal", diagonal)) if value}
    marks |= {"weight": weight, "weights": weights} if weight else {}
    return {"targets": count, "hashes": [fingerprint.hexed(one), fingerprint.hexed(other)]} | marks


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group; scalar tensors stay tensors."""
    options: dict[str, Any] = {"of": len(group["params"])}
    for name, value in group.items():
        if name == "params":
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            options[name] = value.detach().clone()  # converted later: it may be on a device
        elif isinstance(value, bool | int | float | str) or value is None:
            options[name] = value
        elif isinstance(value, tuple | list) and all(isinstance(v, int | float) for v in value):
            options[name] = list(value)
    return options


# -- measurements ------------------------------------------------------------------------------------------------------


SPARSE = 8  # measure moments, and weights that seem unmodified, every so many steps

Local = tuple[Tensor, Block, str]  # local tensor, its block, "partial" or an empty text


@dataclass
class Before:
    """Measured before a step. `weights`: of all parameters; `start`: the same at the first step, with the contents of
    shards. `grads`: of the parameters numbered `present`, None if they are `unclipped` times the clipping's factor;
    `unclipped`: measured before clipping, None where that is not known."""

    locals: list[Local]
    weights: list[Tensor]
    start: list[Tensor] | None
    shards: list[Tensor]
    present: list[int]
    absent: list[int]
    partial: list[int]
    grads: list[Tensor] | None
    unclipped: list[Tensor | None] = field(default_factory=list)


def measured_gradients(parameters: Sequence[Any], sketch: bool = True) -> list[Tensor]:
    """Measure the gradients of parameters that all have one."""
    return measured_locals([placement.local(p.grad) for p in parameters], sketch)


def measured_locals(tensors: Sequence[Local], sketch: bool = True) -> list[Tensor]:
    """Measure local tensors."""
    return measure([t for t, _, _ in tensors], [b for _, b, _ in tensors], sketch=sketch)


def before_step(
    layout: SketchedLayout,
    params: Sequence[Any],
    unclipped: dict[Any, Tensor],
    known: bool,
    fresh: bool,
    often: bool,
    evaluated: bool = False,
) -> Before:
    """Measure weights and gradients. `unclipped`: by key of parameter. `known`: whether gradients are `unclipped` times
    a factor. `fresh`: measure weights even if they seem unmodified. `often`: every step is recorded. `evaluated`: the
    model was evaluated since the last step, where weights may be swapped through `.data`."""
    locals_ = [placement.local(p) for p in params]
    start, shards = None, []
    modified = evaluated or [written(p) for p in params] != layout.versions
    if layout.sketches is not None and not modified and not fresh:
        weights = layout.sketches
    else:  # with a sketch if the last step may not be recorded, or weights were written to since
        weights = measured_locals(locals_, sketch=modified or layout.sketches is None or not often)
    if layout.sketches is None:
        layout.sketches = start = weights
        shards = _contents([t for (t, b, _) in locals_ if b.size != b.shape])
    present = [i for i, p in enumerate(params) if p.grad is not None]
    absent = [i for i, p in enumerate(params) if p.grad is None]
    grads = [placement.local(params[i].grad) for i in present]
    clipped = [unclipped.get(placement.key(params[i])) for i in present] if unclipped else []
    partial = [i for i, (_, _, kind) in zip(present, grads, strict=True) if kind]
    if known and clipped and all(v is not None for v in clipped):
        return Before(locals_, weights, start, shards, present, absent, partial, None, clipped)
    vectors = measured_locals(grads, sketch=not clipped or any(v is None for v in clipped))
    return Before(locals_, weights, start, shards, present, absent, partial, vectors, clipped)


def after_step(
    layout: SketchedLayout, before: Before, parameters: Sequence[Any], record: dict[str, Any]
) -> dict[str, list[Tensor]]:
    """Measure weights and their changes; return both, and the measurements before the step, by name. Adds the
    parameters' numbers to the record."""
    after = measured_locals(before.locals)
    last = layout.sketches or after
    earlier = [b if b.numel() == a.numel() else c for a, b, c in zip(after, before.weights, last, strict=True)]
    layout.sketches = after
    layout.versions = [written(p) for p in parameters]
    record["none"], record["partial"] = before.absent, before.partial
    vectors = {"before": heads(before.weights), "weights": heads(after), "updates": subtracted(after, earlier)}
    if before.start is not None:
        vectors["start"], vectors["shards"] = before.start, before.shards
        record["shards_of"] = [i for i, (_, b, _) in enumerate(before.locals) if b.size != b.shape]
    unclipped = [v for v in before.unclipped if v is not None]
    if before.grads is None:
        record["factor_of_clipping"] = True
        vectors["unclipped"] = unclipped
    elif unclipped and len(unclipped) == len(before.unclipped):
        vectors["grads"], vectors["unclipped"] = heads(before.grads), unclipped
    else:
        vectors["grads"] = before.grads
    return vectors


def moments(optimizer: Any, parameters: Sequence[Any], record: dict[str, Any]) -> list[Tensor]:
    """Measure the optimizer's elementwise state, without sketches, and add its names to the record."""
    tensors, blocks, names = [], [], []
    holders = [o.state for o in nested(optimizer) if isinstance(getattr(o, "state", None), Mapping)]
    for i, p in enumerate(parameters):
        source = getattr(p, "source", p)
        for name, value in next((s[source] for s in holders if s.get(source)), {}).items():
            if isinstance(value, Tensor) and value.shape == local_shape(p) and value.numel() > 1:
                tensor, block, _ = placement.local(value)
                tensors.append(tensor)
                blocks.append(p.block if isinstance(p, placement.FlatPart) else block)
                names.append((i, str(name)))
    record["moments_of"] = names
    return measure(tensors, blocks, sketch=False)


def buffers(roots: Sequence[nn.Module], record: dict[str, Any]) -> list[Tensor]:
    """Measure the models' buffers, and add their names, shapes and dtypes to the record."""
    tensors: dict[str, Tensor] = {}
    for root in roots:
        for name, buffer in root.named_buffers():
            if placement.is_plain_tensor(buffer) and buffer.numel() and buffer.layout == torch.strided:
                tensors.setdefault(placement.plain_name(name), buffer)
    chosen = list(tensors.items())[:2000]
    record["buffers_of"] = [(name, list(t.shape), placement.dtype_name(t)) for name, t in chosen]
    return measure([t for _, t in chosen], [whole(t) for _, t in chosen])


def modules(since: Since, record: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return the measurements of modules at the level `modules`, and add the modules' names and shapes to the
    record."""
    vectors: dict[str, list[Tensor]] = {}
    for kind, rows in (("modules", since.modules), ("returned", since.returned)):
        if rows:
            record[f"{kind}_of"] = [(name, list(shape)) for name, _, shape in rows]
            vectors[kind] = [v for _, v, _ in rows]
    return vectors


def _contents(tensors: list[Tensor]) -> list[Tensor]:
    tensors = [t.detach() for t in tensors]
    rotated = [t.reshape(-1).roll(1).view(t.shape) for t in tensors]
    blocks = [whole(t) for t in tensors]
    return [*measure(tensors, blocks, sketch=False), *measure(rotated, blocks, sketch=False)]


# -- the file ----------------------------------------------------------------------------------------------------------


FORMAT = 1


class Writer:
    """Appends the records of this process to its file, which is created with the first record, when the rank is known.
    Errors do not propagate to the script: a full disk ends the trace with a warning. `replace`: remove the files of an
    earlier run first: each rank its own, and rank 0 those of ranks beyond the world size."""

    def __init__(self, folder: Path, replace: bool = False) -> None:
        self.folder = folder
        self.began = _beginning() if replace else None
        self.failed = False
        self._file: Any = None
        self._pid = 0

    def write(self, kind: str, **values: Any) -> None:
        if self.failed:
            return
        try:
            if self._file is None or self._pid != os.getpid():  # also after a fork
                self._open()
            self._file.write(json.dumps({"kind": kind, **values}, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            self.failed = True
            warn(f"cannot write to {self.folder} any more: {error}. The script continues untraced")

    def close(self) -> None:
        """Close the file of this process; a later record opens it again."""
        if self._file is not None and self._pid == os.getpid():
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self) -> None:
        rank, world = rank_and_world()
        self._pid = os.getpid()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.began is not None:
            _remove_earlier(self.folder, self.began, rank, world)
        host = socket.gethostname().replace("/", "_")
        self._file = (self.folder / f"rank-{rank:05d}-{host}-{self._pid}.jsonl").open("a", encoding="utf-8")
        head = {
            "kind": "process",
            "format": FORMAT,
            "rank": rank,
            "world": world,
            "host": host,
            "pid": self._pid,
            "argv": sys.argv[:1],  # arguments may hold secrets
            "torch": torch.__version__,
            "time": time.time(),
        }
        self._file.write(json.dumps(head) + "\n")


def _beginning() -> float | None:
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0"):
        return None
    if multiprocessing.parent_process() is None or BEGAN not in os.environ:
        os.environ[BEGAN] = repr(time.time())
    return float(os.environ[BEGAN])


def _remove_earlier(folder: Path, began: float, rank: int, world: int) -> None:
    for path in folder.glob("rank-*-*.jsonl"):
        number = path.name.split("-")[1]
        of = int(number) if number.isdigit() else -1
        if (of == rank or (rank == 0 and of >= world)) and path.stat().st_mtime < began:
            path.unlink()
    about = folder / "trace.json"  # written by a command that did not start this run
    if rank == 0 and about.is_file() and about.stat().st_mtime < began:
        about.unlink()


def rank_and_world() -> tuple[int, int]:
    """Return (rank, world size) from the process group, else from the environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if os.environ.get(rank, "").isdigit() and os.environ.get(world, "").isdigit():
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


def warn(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # standard error may be closed or missing
        sys.stderr.write(f"lockstep trace: {text}\n")
        sys.stderr.flush()


def blob(tensor: Tensor) -> str:
    """Encode the bytes of a CPU tensor in base64, without numpy, which may be missing."""
    tensor = tensor.contiguous()
    return base64.b64encode(ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())).decode()


class Pending:
    """A pending copy of the numbers of `record`. `on_device`: whether a copy is in progress."""

    def __init__(self, record: dict[str, Any], since: Any, numbers: Mapping[str, Sequence[Tensor]]) -> None:
        self.record, self.since, self.numbers = record, since, numbers
        away = [v.reshape(-1) for each in numbers.values() for v in each if v.device.type != "cpu"]
        self.on_device = bool(away)
        self._wait: Callable[[], None] | None = None
        self._parts: list[Tensor] = []
        if away:
            joined = torch.cat([v.to(away[0].device) for v in away])
            host, self._wait = transfer(joined)
            self._parts = list(host.split([v.numel() for v in away]))

    def host(self) -> dict[str, list[Tensor]]:
        """Return all numbers on the CPU, waiting for the copy, which began one step earlier."""
        if self._wait is not None:
            self._wait()
        parts = iter(self._parts)
        return {
            name: [v if v.device.type == "cpu" else next(parts).view(v.shape) for v in each]
            for name, each in self.numbers.items()
        }


def transfer(joined: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Copy a device tensor to the CPU; return it with a function that waits for the copy. Called once per step."""
    if joined.device.type != "cuda":
        return joined.cpu(), lambda: None
    host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
    host.copy_(joined, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event.synchronize


def bits_of(number: Tensor) -> Tensor:
    """Return a scalar as float64 bits, int64 [1], on its device."""
    number = number.detach()
    return (number.real if number.is_complex() else number).double().reshape(1).view(torch.int64)


def number_of(bits: Tensor) -> float:
    """Return the number of CPU bits from `bits_of`."""
    return float(bits.view(torch.float64))
