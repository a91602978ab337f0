"""Collects what a process does between two steps of an optimizer, and writes it down after each.

In: the calls of `hooks.py`. Out: records (`writer.py`): process, layout, start, step, skipped, epoch, evaluation, note,
error, end. Never communicates. What lies on a device is copied once a step and written at the next one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import fsdp1, placement, workers
from .fingerprint import Block, differences, heads, measure, width_of
from .inputs import CallInputs, call_inputs
from .pending import Pending, bits_of, number_of
from .settings import Settings
from .writer import Writer, blob

SPARSE = 8  # steps after which moments, and weights that nobody seems to have written to, are measured again
HASHES = 200_000  # of an evaluation pass that are written down


@dataclass
class Since:
    """What happened since the last step of an optimizer."""

    inputs: list[CallInputs] = field(default_factory=list)
    losses: list[tuple[Tensor, bool]] = field(default_factory=list)  # value, whether it is scaled
    backwards: int = 0
    clips: list[dict[str, Any]] = field(default_factory=list)
    norms: list[tuple[dict[str, Any], Tensor]] = field(default_factory=list)  # clip, the norm before it
    clipped: dict[int, Tensor] = field(default_factory=dict)  # id of parameter -> measured before clipping
    schedulers: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    scale: Tensor | None = None
    unscaled: bool = False
    training: bool | None = None
    autocast: str | None = None  # dtype that products are computed in, "" where autocast is off
    modules: list[tuple[str, Tensor, tuple[int, ...]]] = field(default_factory=list)  # outputs, in order of forward
    returned: list[tuple[str, Tensor, tuple[int, ...]]] = field(default_factory=list)  # their gradients, of backward


@dataclass
class SketchedLayout:
    """The parameters of an optimizer, as written down last."""

    signature: tuple[Any, ...]
    number: int
    sketches: list[Tensor] | None = None  # of the weights after the last step
    versions: list[tuple[int, int]] | None = None  # of the weights then: count of writes, address


@dataclass
class Evaluation:
    """Forward passes without gradients, until training goes on."""

    root: str
    loader: str | None
    training: bool
    active: list[str]
    hashes: list[Tensor] = field(default_factory=list)
    count: int = 0


@dataclass
class Scheduler:
    """A scheduler of learning rates, from when it is made on. `stepped`: it or another one of its optimizer was."""

    ref: weakref.ref[Any]
    optimizer: weakref.ref[Any]
    name: str
    stepped: bool = False


class Recorder:
    """Of this process. Methods are called from hooks and may raise; hooks turn that into records."""

    def __init__(self, settings: Settings, writer: Writer) -> None:
        self.settings = settings
        self.writer = writer
        self.active = True
        self.roots: list[weakref.ref[nn.Module]] = []
        self.optimizers: list[weakref.ref[Any]] = []
        self.schedulers: list[Scheduler] = []
        self.steps: list[int] = []
        self.layouts: dict[int, SketchedLayout] = {}
        self.since = Since()
        self.evaluation: Evaluation | None = None
        self.loader: str | None = None
        self.last_grads: dict[int, list[tuple[weakref.ref[Any], weakref.ref[Any], int]]] = {}
        self.zeroed: dict[int, bool] = {}  # by optimizer, since its last step
        self.pending: list[Any] = []
        self.perturbed = False
        self.loaders = 0
        self._names: tuple[dict[int, str], list[list[str]]] = ({}, [])
        self._deciding: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
        self._layouts = 0
        self._before: dict[int, list[Tensor]] = {}

    # -- forward and backward ----------------------------------------------------------------------------------------

    def entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The outermost module that holds parameters is about to be called, outside backward."""
        gradients = torch.is_grad_enabled()
        if self.settings.perturb and not self.perturbed:
            self.perturbed = True
            perturb(module)
        batch = call_inputs(args, kwargs)
        if not gradients:
            self._evaluated(module, batch)
            return
        self.root(module)
        training = self.trains(module)
        self.since.training = training if self.since.training is None else self.since.training and training
        if batch is not None:
            self.since.inputs.append(batch)

    def inside(self) -> None:
        """The first module inside of the outermost one is called: wrappers switch autocast on in between."""
        device = "cuda" if torch.cuda.is_available() and torch.is_autocast_enabled("cuda") else "cpu"
        on = torch.is_autocast_enabled(device)
        self.since.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else ""

    def root(self, module: nn.Module) -> None:
        if all(ref() is not module for ref in self.roots):
            self.roots = [ref for ref in self.roots if ref() is not None]
            self.roots.append(weakref.ref(module))
            self._names = ({}, [])
            self.write(
                "model",
                name=type(module).__name__,
                wrappers=placement.kinds_of(module),
                fsdp=placement.is_fsdp(module),
                training=self.trains(module),
                stochastic=placement.has_stochastic(module),
            )

    def trains(self, module: nn.Module) -> bool:
        """Whether a model that is called is in training mode."""
        if module not in self._deciding:
            self._deciding[module] = [weakref.ref(m) for m in placement.deciding(module)]
        return any(m.training for ref in self._deciding[module] if (m := ref()) is not None)

    def _evaluated(self, module: nn.Module, batch: CallInputs | None) -> None:
        name, training = type(module).__name__, self.trains(module)
        now = self.evaluation
        if now is None or (now.root, now.loader, now.training) != (name, self.loader, training):
            self.end_evaluation()
            active = placement.stochastic(module)
            now = self.evaluation = Evaluation(name, self.loader, training, active[:20])
        if batch is not None:
            now.count += len(batch.hashes)
            if now.count <= HASHES:
                now.hashes.append(batch.hashes)

    def end_evaluation(self) -> None:
        now, self.evaluation = self.evaluation, None
        if now is not None and now.count:
            self.write(
                "evaluation",
                model=now.root,
                loader=now.loader,
                training=now.training,
                active=now.active,
                count=now.count,
                examples=hexed(now.hashes),
                steps=list(self.steps),
            )

    def backward(self, tensors: Any, scaled: bool) -> None:
        """`backward` is about to be called on tensors."""
        if self.evaluation is not None and self.since.inputs:
            self.end_evaluation()
        self._look_for_zeroed_gradients()
        self.since.backwards += 1
        for clip in self.since.clips:
            if not clip.get("early"):
                clip["early"] = True
        loss = tensors if isinstance(tensors, Tensor) else (tensors[0] if len(tensors) == 1 else None)
        if loss is not None and placement.is_plain_tensor(loss) and loss.numel() == 1:
            self.since.losses.append((loss.detach().reshape(()).clone(), scaled))

    def _look_for_zeroed_gradients(self) -> None:
        """Whether anybody has zeroed gradients since the last step of each optimizer: they are None, other objects, or
        were written to. `grad.data.zero_()` writes without being counted, so that first steps look at values."""
        for number, grads in self.last_grads.items():
            if self.zeroed.get(number, True):
                continue
            same = [g for p, ref, version in grads if (g := _same(p, ref, version)) is not None]
            early = self.steps[number] < 5 and len(same) == len(grads)
            if len(same) < len(grads) or (early and not any(bool(g.count_nonzero()) for g in same[:3])):
                self.zeroed[number] = True

    def after_backward(self) -> None:
        """The gradients as this backward left them: what is written to them from now on is somebody else's."""
        for number, grads in self.last_grads.items():
            if not self.zeroed.get(number, True):
                self.last_grads[number] = _gradient_versions(p for ref, _, _ in grads if (p := ref()) is not None)

    # -- clipping, scaling, schedules --------------------------------------------------------------------------------

    def clipping(self, parameters: list[Tensor], how: str, limit: Any) -> dict[str, Any]:
        """Before gradients are clipped. The record is completed by the caller with `norm`."""
        grads = [p for p in self.parts(parameters) if p.grad is not None]
        clip: dict[str, Any] = {"how": how, "limit": _number(limit), "backwards": self.since.backwards}
        clip["of"] = len(grads)
        if self.since.scale is not None and not self.since.unscaled:
            clip["scaled"] = True  # unless the scale turns out to be 1
        self.since.clips.append(clip)
        if self.measures() and grads:
            parts = [placement.local(p.grad) for p in grads]
            measured = measure([t for t, _, _ in parts], [b for _, b, _ in parts])
            self.since.clipped = {placement.key(p): v for p, v in zip(grads, measured, strict=True)}
        return clip

    def has_scheduler(self, scheduler: Any) -> None:
        """A scheduler was made."""
        ref, optimizer = weakref.ref(scheduler), weakref.ref(scheduler.optimizer)
        self.schedulers.append(Scheduler(ref, optimizer, type(scheduler).__name__))

    def steps_scheduler(self, scheduler: Any) -> None:
        for each in self.schedulers:
            each.stepped = each.stepped or each.optimizer() is scheduler.optimizer

    def idle(self, optimizer: Any) -> list[tuple[int, str]]:
        """Number and name of the schedulers of an optimizer of which none was ever stepped."""
        members = _inside(optimizer)
        return [
            (i, each.name)
            for i, each in enumerate(self.schedulers)
            if not each.stepped and each.ref() is not None and members & _inside(each.optimizer())
        ]

    def scheduled(self, name: str, by: str) -> None:
        key = f"{name} by {by}" if by else name
        self.since.schedulers[key] = self.since.schedulers.get(key, 0) + 1

    # -- steps -------------------------------------------------------------------------------------------------------

    def measures(self, step: int | None = None) -> bool:
        """Whether tensors of a step are measured. None: of the next one of any optimizer."""
        step = min(self.steps, default=0) if step is None else step
        return self.settings.level != "losses" and step % self.settings.every == 0

    def number_of(self, optimizer: Any) -> int:
        for number, ref in enumerate(self.optimizers):
            if ref() is optimizer:
                return number
        self.optimizers.append(weakref.ref(optimizer))
        self.steps.append(0)
        return len(self.optimizers) - 1

    def parts(self, parameters: Iterable[Any]) -> list[Any]:
        """What stands for parameters: themselves, or the parts that a rank's shard holds of them."""
        roots = [r for ref in self.roots if (r := ref()) is not None]
        return [part for parts in fsdp1.expanded(parameters, roots) for part in parts]

    def names(self, fresh: bool = False) -> tuple[dict[int, str], list[list[str]]]:
        if fresh or not self._names[0]:
            self._names = placement.named_parameters([r for ref in self.roots if (r := ref()) is not None])
        return self._names

    def before_step(self, optimizer: Any) -> dict[str, Any]:
        """Gradients as the optimizer gets them, and weights before. Returns what `after_step` needs."""
        number = self.number_of(optimizer)
        step = self.steps[number]
        if self.settings.steps is not None and step >= self.settings.steps:
            self.flush()
            return {"number": number, "skip": True}
        groups_ = enumerate(optimizer.param_groups)
        parameters = [(p, g) for g, group in groups_ for p in self.parts(group["params"])]
        layout = self._layout_of(optimizer, number, parameters)
        groups = [options_of(group) for group in optimizer.param_groups]  # a scheduler changes them after the step
        here: dict[str, Any] = {"number": number, "layout": layout, "parameters": parameters, "groups": groups}
        if step and self.since.backwards and not self.zeroed.get(number, True):
            self.since.notes.append(f"not zeroed: {number}")
        if not self.measures(step):
            return here
        params = [p for p, _ in parameters]
        locals_ = [placement.local(p) for p in params]
        here["locals"] = locals_
        versions = [written(p) for p in params]
        if layout.sketches is not None and versions == layout.versions and step % SPARSE:
            weights = layout.sketches  # nobody has written to them since
        else:
            sketch = layout.sketches is None or self.settings.every > 1  # of this step, not of those since the last one
            weights = measure([t for t, _, _ in locals_], [b for _, b, _ in locals_], sketch=sketch)
        if layout.sketches is None:
            layout.sketches = here["start"] = weights
        here["before"] = weights
        present = [i for i, p in enumerate(params) if p.grad is not None]
        here["none"] = [i for i, p in enumerate(params) if p.grad is None]
        grads = [placement.local(params[i].grad) for i in present]
        known = self.since.clipped
        again = self.since.clips and not any(c.get("early") for c in self.since.clips)
        here["clipped"] = [known.get(placement.key(params[i])) for i in present] if again else []
        need = not here["clipped"] or any(v is None for v in here["clipped"])
        here["grads"] = measure([t for t, _, _ in grads], [b for _, b, _ in grads], sketch=need)
        here["present"] = present
        here["partial"] = [i for i, (_, _, kind) in zip(present, grads, strict=True) if kind]
        scale = getattr(optimizer, "grad_scale", None)
        here["grad_scale"] = None if scale is None else scale.detach().reshape(-1)[:1].clone()
        return here

    def after_step(self, optimizer: Any, here: dict[str, Any]) -> None:
        number = here["number"]
        if here.get("skip"):
            self.since = Since()
            self.steps[number] += 1
            return
        self.flush()
        record = self._cheap(here) | {"idle": self.idle(optimizer)}
        vectors: dict[str, list[Tensor]] = {}
        if "grads" in here:
            vectors = self._measured(optimizer, here, record)
        sources = (getattr(p, "source", p) for p, _ in here["parameters"])
        own = (p if p.grad is not None else q for p, (q, _) in zip(sources, here["parameters"], strict=True))
        self.last_grads[number] = _gradient_versions(own)
        self.zeroed[number] = not self.last_grads[number]
        pending = Pending(record, self.since, vectors | _numbers(self.since, here["groups"]))
        self.pending.append(pending)
        self.steps[number] += 1
        self.since = Since()
        if not pending.on_device:
            self.flush()

    def _cheap(self, here: dict[str, Any]) -> dict[str, Any]:
        number, since = here["number"], self.since
        names, _ = self.names()
        outside = {}
        optimized = {
            id(getattr(p, "source", p))
            for ref in self.optimizers
            if (o := ref()) is not None
            for g in o.param_groups
            for p in g["params"]
        }
        for root in (r for ref in self.roots if (r := ref()) is not None):
            for parameter in root.parameters():
                if parameter.requires_grad and id(parameter) not in optimized:
                    if id(parameter) not in names:  # made or replaced since
                        names = self.names(fresh=True)[0]
                    outside[names.get(id(parameter), "?")] = parameter.grad is not None
        return {
            "opt": number,
            "step": self.steps[number],
            "layout": here["layout"].number,
            "loader": self.loader,
            "forwards": len(since.inputs),
            "backwards": since.backwards,
            "clips": since.clips,
            "schedulers": since.schedulers,
            "notes": since.notes,
            "unscaled": since.unscaled,
            "training": since.training,
            "autocast": since.autocast,
            "groups": here["groups"],
            "outside": outside,
            "generators": workers.states(),
        }

    def _measured(self, optimizer: Any, here: dict[str, Any], record: dict[str, Any]) -> dict[str, list[Tensor]]:
        layout, locals_ = here["layout"], here["locals"]
        after = measure([t for t, _, _ in locals_], [b for _, b, _ in locals_])
        before, last = here["before"], layout.sketches or after
        updates = differences(
            after, [b if b.numel() == a.numel() else c for a, b, c in zip(after, before, last, strict=True)]
        )
        layout.sketches = after
        params = [p for p, _ in here["parameters"]]
        layout.versions = [written(p) for p in params]
        record["none"], record["partial"] = here["none"], here["partial"]
        vectors = {"before": heads(here["before"]), "weights": heads(after), "updates": updates}
        if "start" in here:
            vectors["start"] = here["start"]
        grads, clipped = here["grads"], here["clipped"]
        if clipped and all(v is not None for v in clipped):
            vectors["grads"] = heads(grads)
            vectors["unclipped"] = clipped
        else:
            vectors["grads"] = grads
        if here["grad_scale"] is not None:
            vectors["grad_scale"] = [here["grad_scale"].double().view(torch.int64)]
        sparse = self.steps[here["number"]] % SPARSE
        moments, names = ([], []) if sparse else self._moments(optimizer, here["parameters"])
        record["moments_of"] = names
        vectors["moments"] = moments
        buffers = self._buffers()
        record["buffers_of"] = [(name, list(t.shape), placement.dtype_name(t)) for name, t in buffers]
        vectors["buffers"] = measure(
            [t for _, t in buffers], [Block(tuple(t.shape), (0,) * t.dim(), tuple(t.shape)) for _, t in buffers]
        )
        for kind, rows in (("modules", self.since.modules), ("returned", self.since.returned)):
            if rows:
                record[f"{kind}_of"] = [(name, list(shape)) for name, _, shape in rows]
                vectors[kind] = [v for _, v, _ in rows]
        return vectors

    def _moments(
        self, optimizer: Any, parameters: list[tuple[Tensor, int]]
    ) -> tuple[list[Tensor], list[tuple[int, str]]]:
        tensors, blocks, names = [], [], []
        for i, (p, _) in enumerate(parameters):
            for name, value in (optimizer.state.get(getattr(p, "source", p)) or {}).items():
                if isinstance(value, Tensor) and value.shape == _local_shape(p) and value.numel() > 1:
                    tensor, block, _ = placement.local(value)
                    block = p.block if isinstance(p, placement.FlatPart) else block
                    tensors.append(tensor)
                    blocks.append(block)
                    names.append((i, str(name)))
        return measure(tensors, blocks, sketch=False), names

    def _buffers(self) -> list[tuple[str, Tensor]]:
        buffers: dict[str, Tensor] = {}
        for root in (r for ref in self.roots if (r := ref()) is not None):
            for name, buffer in root.named_buffers():
                if placement.is_plain_tensor(buffer) and buffer.numel() and buffer.layout == torch.strided:
                    buffers.setdefault(placement.plain_name(name), buffer)
        return list(buffers.items())[:2000]

    def _layout_of(self, optimizer: Any, number: int, parameters: list[tuple[Tensor, int]]) -> SketchedLayout:
        fresh = self.steps[number] % 16 == 0
        names, ties = self.names(fresh)
        known = self.layouts.get(number)
        signature = (
            *((placement.key(p), p.dtype, tuple(p.shape), p.device) for p, _ in parameters),
            tuple(map(tuple, ties)),
            tuple(placement.name_of(p, names) for p, _ in parameters),
        )
        if known is not None and known.signature == signature:
            return known
        layout = SketchedLayout(signature, self._layouts)
        self._layouts += 1
        rows = []
        for i, (p, group) in enumerate(parameters):
            _, block, partial = placement.local(p)
            rows.append(
                {
                    "name": placement.name_of(p, names) or f"?{type(optimizer).__name__}{number}.{i}",
                    "held": id(getattr(p, "source", p)) in names,
                    "shape": list(block.shape),
                    "offset": list(block.offset),
                    "size": list(block.size),
                    "width": width_of(block.shape),
                    "dtype": placement.dtype_name(p),
                    "device": p.device.type,
                    "group": group,
                    "trained": p.requires_grad,
                    "partial": partial,
                }
            )
        meshes = [m for p, _ in parameters if (m := placement.mesh_of(p)) is not None]
        mesh = max(meshes, key=lambda m: len(m["sizes"]), default=None)  # a layer may lie on a part of the mesh alone
        roots = [type(r).__name__ for ref in self.roots if (r := ref()) is not None]
        self.write(
            "layout",
            id=layout.number,
            opt=number,
            optimizer=getattr(optimizer, "kind", type(optimizer).__name__),
            parameters=rows,
            ties=ties,
            untied=self._untied(),
            mesh=mesh,
            models=roots,
        )
        self.layouts[number] = layout
        return layout

    def _untied(self) -> bool:
        """Whether a model of transformers says that its embeddings are tied, and they are two parameters."""
        for root in (r for ref in self.roots if (r := ref()) is not None):
            module: Any
            for module in root.modules():
                config = getattr(module, "config", None)
                if getattr(config, "tie_word_embeddings", False) and hasattr(module, "get_output_embeddings"):
                    one, other = module.get_input_embeddings(), module.get_output_embeddings()
                    weights = [getattr(m, "weight", None) for m in (one, other)]
                    return all(w is not None for w in weights) and weights[0] is not weights[1]
        return False

    def skipped(self, optimizer: Any) -> None:
        """A scaler found gradients that are not finite, and the optimizer made no step."""
        number = self.number_of(optimizer)
        self.flush()
        scale = None if self.since.scale is None else float(self.since.scale)  # the scaler has waited for the device
        examples = hexed([s.hashes for s in self.since.inputs])
        self.write("skipped", opt=number, step=self.steps[number], scale=scale, examples=examples)
        self.last_grads = {}
        self.since = Since()

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, kind: str, **values: Any) -> None:
        if self.active:
            self.writer.write(kind, **values)

    def flush(self) -> None:
        """Write the records whose numbers were on their way."""
        pending, self.pending = self.pending, []
        for each in pending:
            record, numbers = each.record, each.host()
            _fill_in(record, each.since, numbers)
            for name in [n for n in numbers if n not in OF_STEP]:
                record[name] = packed(numbers[name])
            if (start := record.pop("start", None)) is not None:
                self.write("start", opt=record["opt"], step=record["step"], layout=record["layout"], weights=start)
            self.write("step", **record)

    def end(self) -> None:
        """The process ends by itself."""
        self.flush()
        self.end_evaluation()
        if self.steps:
            stepped = [i for i, each in enumerate(self.schedulers) if each.stepped]
            self.write("end", steps=self.steps, backwards=self.since.backwards, stepped=stepped)


def packed(vectors: list[Tensor]) -> dict[str, str]:
    """Fingerprints (int64), sums of squares (float64) and sketches (float32), one after another, in base64."""
    if not vectors:
        return {"fp": "", "sq": "", "sk": ""}
    vectors = [v if v.numel() > 1 else torch.cat([v, v]) for v in vectors]
    if len({v.numel() for v in vectors}) == 1:  # the usual, and 600 operations less for 300 tensors
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
    numbers = torch.cat([h.to("cpu") for h in hashes]).tolist()
    return [f"{n & (1 << 64) - 1:016x}" for n in numbers]


OF_STEP = ("examples", "targets", "losses", "scale", "norms", "options")  # of `_numbers`


def _numbers(since: Since, groups: list[dict[str, Any]]) -> dict[str, list[Tensor]]:
    """What was kept since the last step and may lie on a device. `_fill_in` reads it a step later."""
    return {
        "examples": [s.hashes for s in since.inputs],
        "targets": [s.targets.reshape(1) for s in since.inputs if s.targets is not None],
        "losses": [bits_of(value) for value, _ in since.losses],
        "scale": [] if since.scale is None else [bits_of(since.scale)],
        "norms": [bits_of(norm) for _, norm in since.norms],
        "options": [bits_of(v) for group in groups for v in group.values() if isinstance(v, Tensor)],
    }


def _fill_in(record: dict[str, Any], since: Since, numbers: dict[str, list[Tensor]]) -> None:
    """Put what `_numbers` kept into a step's record."""
    scale = record["scale"] = next((number_of(v) for v in numbers["scale"]), None)
    record["examples"] = hexed(numbers["examples"])
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


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a parameter group; tensors of one number are still tensors."""
    options: dict[str, Any] = {"of": len(group["params"])}
    for name, value in group.items():
        if name == "params":
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            options[name] = value.detach().clone()  # a number later: it may lie on a device
        elif isinstance(value, bool | int | float | str) or value is None:
            options[name] = value
        elif isinstance(value, tuple | list) and all(isinstance(v, int | float) for v in value):
            options[name] = list(value)
    return options


def _gradient_versions(parameters: Iterable[Any]) -> list[tuple[weakref.ref[Any], weakref.ref[Any], int]]:
    """Of the first few parameters with gradients, what tells whether the gradient is written to."""
    references = ((weakref.ref(p), weakref.ref(p.grad), _version(p.grad)) for p in parameters if p.grad is not None)
    return list(itertools.islice(references, 8))


def _same(parameter: Any, grad: Any, version: int) -> Tensor | None:
    p, g = parameter(), grad()
    return g if p is not None and g is not None and p.grad is g and _version(g) == version else None


def _local_shape(parameter: Any) -> torch.Size:
    """What a state of its optimizer has as its shape where it holds a number for each element."""
    return parameter.tensor.shape if isinstance(parameter, placement.FlatPart) else parameter.shape


def _version(tensor: Any) -> int:
    if placement.is_dtensor(tensor):
        tensor = tensor.to_local()
    return int(getattr(tensor, "_version", 0))


def written(parameter: Any) -> tuple[int, int]:
    """What changes where a parameter's values do: its count of writes, and its address."""
    if isinstance(parameter, placement.FlatPart):
        parameter = parameter.tensor
    plain = isinstance(parameter, Tensor) and not placement.is_dtensor(parameter)
    return _version(parameter), parameter.data_ptr() if plain else 0


def _inside(optimizer: Any) -> set[int]:
    """An optimizer and those that it wraps, as Accelerate's and DeepSpeed's do."""
    ids: set[int] = set()
    while optimizer is not None and id(optimizer) not in ids:
        ids.add(id(optimizer))
        optimizer = getattr(optimizer, "optimizer", None)
    return ids


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def perturb(module: nn.Module) -> None:
    """Flip the last bit of half of the weights, by a fixed pattern: as far apart as rounding is."""
    from .fingerprint import mixed, shifted

    kinds = {
        torch.float32: torch.int32,
        torch.float64: torch.int64,
        torch.bfloat16: torch.int16,
        torch.float16: torch.int16,
    }
    with torch.no_grad():
        for parameter in module.parameters():
            tensor, _, _ = placement.local(parameter.detach())
            if tensor.dtype in kinds and tensor.is_contiguous() and tensor.numel():
                bits = tensor.view(kinds[tensor.dtype]).view(-1)
                for at in range(0, bits.numel(), 1 << 20):
                    part = bits[at : at + (1 << 20)]
                    flips = shifted(mixed(part.numel(), first=(1 << 46) + at), 41) & 1
                    part.bitwise_xor_((flips * (part != 0).cpu()).to(part.dtype).to(part.device))
