"""Records the events of a process between optimizer steps, and writes one record per step.

In: calls from `hooks.py`. Out: records (`writer.py`): process, layout, start, step, skipped, epoch, evaluation, note,
error, end. Never communicates. Device data is copied once per step and written at the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import fsdp1, placement, workers
from .check.checker import Checker
from .fingerprint import Block, differences, heads, measure, whole, width_of
from .graph import objectives, unmasked_attention
from .inputs import CallInputs, call_inputs
from .pending import Pending
from .perturbation import perturb
from .records import OF_STEP, Since, fill_in, hexed, numbers_of, options_of, packed
from .schedules import Schedules
from .settings import Settings
from .versions import GradientVersion, gradient_versions, has_gradient, local_shape, touched, untouched, written
from .writer import Writer

if TYPE_CHECKING:
    from .operations import Operations

SPARSE = 8  # measure moments, and weights that seem unmodified, every so many steps
HASHES = 200_000  # most hashes recorded per evaluation pass
LOOKED_AT = 8  # first steps in which values are read, which synchronizes with the device


@dataclass
class SketchedLayout:
    """The parameters of an optimizer, as last recorded."""

    signature: tuple[Any, ...]
    number: int
    sketches: list[Tensor] | None = None  # of the weights after the last step
    versions: list[tuple[int, int]] | None = None  # (version, address) of the weights then


@dataclass
class Evaluation:
    """Forward passes without gradients, until training continues."""

    root: str
    loader: str | None
    training: bool
    active: list[str]
    trained: bool
    between: bool
    mode: dict[str, Any]
    optimizers: list[int]
    hashes: list[Tensor] = field(default_factory=list)
    known: list[Tensor] = field(default_factory=list)  # without labels
    count: int = 0


class Recorder:
    """Recorder of this process. Methods are called from hooks, which turn exceptions into records."""

    def __init__(self, settings: Settings, writer: Writer) -> None:
        self.settings = settings
        self.writer = writer
        self.active = True
        self.checker: Checker | None = None
        self.roots: list[weakref.ref[nn.Module]] = []
        self.optimizers: list[weakref.ref[Any]] = []
        self.schedules = Schedules()
        self.steps: list[int] = []
        self.layouts: dict[int, SketchedLayout] = {}
        self.since = Since()
        self.evaluation: Evaluation | None = None
        self.loader: str | None = None
        self.last_grads: dict[int, list[GradientVersion]] = {}
        self.after: list[GradientVersion] = []  # gradients after the last backward or clipping
        self.clipped_now: list[tuple[dict[str, Any], list[GradientVersion]]] = []  # since the last step
        self.zeroed: dict[int, bool] = {}  # by optimizer, since its last step
        self.pending: list[Any] = []
        self.perturbed = False
        self.loaders = 0
        self.batch = 0  # of `loader`
        self.datasets: list[tuple[int, Any]] = []
        self.wrappers: list[weakref.ref[Any]] = []  # DistributedDataParallel objects
        self.with_gradients = False  # in the last outermost call of a model
        self.by_scaler = False  # whether a scaler makes the step
        self.optimizers_made = 0
        self.late: dict[int, weakref.ref[Any]] = {}  # parameters created after an optimizer
        self.operations: Operations | None = None  # at the level `operations`
        self.cleared = 0  # how often autocast's cache was cleared
        self.cast_at = self.stepped_at = -1  # `cleared` at the last forward under autocast, and at a step after it
        self.packed_looks = 0
        self._names: tuple[dict[int, str], list[list[str]]] = ({}, [])
        self._deciding: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
        self._layouts = 0
        self._before: dict[int, list[Tensor]] = {}

    # -- forward and backward ----------------------------------------------------------------------------------------

    def entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that the outermost module with parameters is about to be called, outside backward."""
        gradients = self.with_gradients = torch.is_grad_enabled()
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
        if self.since.mode is None:
            self.since.mode = self.mode(module)
        if self.since.autocast is None and next(module.children(), None) is None:
            self.inside(module)
        if batch is not None:
            self.since.inputs.append(batch)
            self.since.fed.append((self.loader, self.batch))

    def inside(self, module: nn.Module) -> None:
        """Record the autocast state at the first inner module: wrappers enable autocast before it."""
        device = "cuda" if torch.cuda.is_available() and torch.is_autocast_enabled("cuda") else "cpu"
        on = torch.is_autocast_enabled(device)
        self.since.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else ""
        if on and torch.is_autocast_cache_enabled() and torch.is_grad_enabled():
            if self.stepped_at == self.cleared:
                roots = [r for ref in self.roots if (r := ref()) is not None]
                self.since.stale_casts = placement.cast_weights(roots)
            self.cast_at = self.cleared

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
                dropout=placement.has_dropout(module),
                number=len(self.roots) - 1,
                group=placement.replicas_of(module, self.wrappers),
            )

    def trains(self, module: nn.Module) -> bool:
        """Return whether a model is in training mode."""
        return any(m.training for m in self._decide(module))

    def _decide(self, module: nn.Module) -> list[nn.Module]:
        if module not in self._deciding:
            self._deciding[module] = [weakref.ref(m) for m in placement.deciding(module)]
        return [m for ref in self._deciding[module] if (m := ref()) is not None]

    def mode(self, module: nn.Module) -> dict[str, Any]:
        """Return the model's mode, and [in training mode, total] for its dropout and batch norm modules."""
        dropout = [m for m in self._decide(module) if isinstance(m, placement.DROPOUT)]
        norms = [m for m in self._decide(module) if isinstance(m, placement.BATCH_NORM)]
        counts = {k: [sum(m.training for m in ms), len(ms)] for k, ms in (("dropout", dropout), ("norms", norms))}
        return {"root": placement.unwrapped(module).training, **counts}

    def _evaluated(self, module: nn.Module, batch: CallInputs | None) -> None:
        name, training = type(module).__name__, self.trains(module)
        now = self.evaluation
        first = next(module.parameters(), None)
        trained = first is not None and id(first) in self.names()[0]
        between = len(self.since.inputs) > self.since.backwards
        if now is None or (now.root, now.loader, now.training, now.trained, now.between) != (
            name,
            self.loader,
            training,
            trained,
            between,
        ):
            self.end_evaluation()
            active = placement.stochastic(module)
            mode = self.mode(module)
            now = Evaluation(name, self.loader, training, active[:20], trained, between, mode, self._trainers(module))
            self.evaluation = now
        if batch is not None:
            now.count += len(batch.hashes)
            if now.count <= HASHES:
                now.hashes.append(batch.hashes)
                now.known.append(batch.hashes if batch.unlabelled is None else batch.unlabelled)

    def _trainers(self, module: nn.Module) -> list[int]:
        """Return the numbers of the optimizers that hold a model's parameters."""
        own = {id(p) for p in module.parameters()}
        optimizers = ((n, o) for n, ref in enumerate(self.optimizers) if (o := ref()) is not None)
        return [n for n, o in optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])]

    def end_evaluation(self) -> None:
        now, self.evaluation = self.evaluation, None
        if now is not None and now.count:
            self.write(
                "evaluation",
                model=now.root,
                loader=now.loader,
                training=now.training,
                active=now.active,
                trained=now.trained,
                between=now.between,
                mode=now.mode,
                optimizers=now.optimizers,
                known=hexed(now.known),
                count=now.count,
                examples=hexed(now.hashes),
                steps=list(self.steps),
            )

    def backward(self, tensors: Any, scaled: bool) -> None:
        """Record that `backward` is about to be called on tensors."""
        if self.evaluation is not None and self.since.inputs:
            self.end_evaluation()
        self._look_for_zeroed_gradients()
        self.since.backwards += 1
        self.clipped_now = [(clip, rows) for clip, rows in self.clipped_now if not touched(rows)]
        loss = tensors if isinstance(tensors, Tensor) else (tensors[0] if len(tensors) == 1 else None)
        if loss is not None and placement.is_plain_tensor(loss) and loss.numel() == 1:
            self.since.losses.append((loss.detach().reshape(()).clone(), scaled))
            self.since.objectives += objectives(loss)
        if loss is not None and self.packed_looks < 2 and any(s.restarts is not None for s in self.since.inputs):
            self.packed_looks += 1
            self.since.unmasked = unmasked_attention(loss)

    def _look_for_zeroed_gradients(self) -> None:
        """Check whether gradients were zeroed since each optimizer's last step: they are None, new objects, or
        modified.

        torch does not count writes by `grad.data.zero_()`, so the first steps also read the values."""
        for number, grads in self.last_grads.items():
            if self.zeroed.get(number, True):
                continue
            same = [g for row in grads if (g := untouched(row)) is not None]
            early = 0 < self.steps[number] <= LOOKED_AT
            if len(same) < len(grads) or not same or not early or not all(bool(g.count_nonzero()) for g in same[:3]):
                self.zeroed[number] = True

    def after_backward(self) -> None:
        """Store the gradients' versions after backward, to detect later modifications."""
        for number, grads in self.last_grads.items():
            if not self.zeroed.get(number, True):
                self.last_grads[number] = gradient_versions(p for ref, _, _ in grads if (p := ref()) is not None)
        for clip, rows in self.clipped_now:  # gradients clipped before this backward
            if any(has_gradient(row) and untouched(row) is None for row in rows):
                clip["early"] = True
        self.clipped_now = []
        roots = (r for ref in self.roots if (r := ref()) is not None)
        self.after = gradient_versions(p for root in roots for p in root.parameters())

    def scaled(self, scale: Tensor) -> None:
        """Record the scale of a loss that a scaler multiplied."""
        self.since.scale = scale.detach().clone()

    def collective(self, name: str, elements: int) -> None:
        """Count a call of a torch.distributed collective."""
        row = self.since.collectives.setdefault(name, [0, 0])
        row[0] += 1
        row[1] += elements

    # -- clipping, scaling, schedules --------------------------------------------------------------------------------

    def clipping(self, parameters: list[Tensor], how: str, limit: Any) -> dict[str, Any]:
        """Record a clipping before it runs, and return the record, to which the caller adds `norm`."""
        grads = [p for p in self.parts(parameters) if p.grad is not None]
        clip: dict[str, Any] = {"how": how, "limit": _number(limit), "backwards": self.since.backwards}
        clip["of"] = len(grads)
        if self.since.scale is not None and not self.since.unscaled:
            clip["scaled"] = True  # unless the scale turns out to be 1
        self.since.clips.append(clip)
        self.since.rewritten = self.since.rewritten or touched(self.after)
        clip["rewritten"] = self.since.rewritten
        if self.measures() and grads:
            parts = [placement.local(p.grad) for p in grads]
            measured = measure([t for t, _, _ in parts], [b for _, b, _ in parts])
            self.since.clipped = {placement.key(p): v for p, v in zip(grads, measured, strict=True)}
        return clip

    def has_clipped(self, clip: dict[str, Any], parameters: list[Tensor]) -> None:
        """Record the gradients' versions after clipping."""
        self.after = gradient_versions(ref for row in self.after if (ref := row[0]()) is not None)
        self.clipped_now.append((clip, gradient_versions(parameters)))

    # -- steps -------------------------------------------------------------------------------------------------------

    def measures(self, step: int | None = None) -> bool:
        """Return whether tensors of a step are measured. `step`: None for the next step of any optimizer."""
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
        """Return the parameters themselves, or the parts of them in a rank's shard."""
        roots = [r for ref in self.roots if (r := ref()) is not None]
        return [part for parts in fsdp1.expanded(parameters, roots) for part in parts]

    def versions(self) -> dict[int, tuple[int, int]]:
        """Return (version, address) of each optimized parameter after the last measured step, by id."""
        rows: dict[int, tuple[int, int]] = {}
        for number, ref in enumerate(self.optimizers):
            layout = self.layouts.get(number)
            if (optimizer := ref()) is not None and layout is not None and layout.versions is not None:
                params = self.parts(p for group in optimizer.param_groups for p in group["params"])
                if len(params) == len(layout.versions):
                    rows |= {id(p): v for p, v in zip(params, layout.versions, strict=True)}
        return rows

    def names(self, fresh: bool = False) -> tuple[dict[int, str], list[list[str]]]:
        if fresh or not self._names[0]:
            self._names = placement.named_parameters([r for ref in self.roots if (r := ref()) is not None])
        return self._names

    def before_step(self, optimizer: Any) -> dict[str, Any]:
        """Measure gradients and weights before a step, and return the values that `after_step` needs."""
        number = self.number_of(optimizer)
        step = self.steps[number]
        if self.settings.steps is not None and step >= self.settings.steps:
            self.flush()
            return {"number": number, "skip": True}
        groups_ = enumerate(optimizer.param_groups)
        parameters = [(p, g) for g, group in groups_ for p in self.parts(group["params"])]
        layout = self._layout_of(optimizer, number, parameters)
        groups = [options_of(group) for group in optimizer.param_groups]  # a scheduler changes them after the step
        here: dict[str, Any] = {
            "number": number,
            "layout": layout,
            "optimizer": optimizer,
            "parameters": parameters,
            "groups": groups,
        }
        if step and self.since.backwards and not self.zeroed.get(number, True):
            self.since.notes.append(f"not zeroed: {number}")
        here["rewritten"] = self.since.rewritten or touched(self.after)
        if not self.measures(step):
            return here
        params = [p for p, _ in parameters]
        locals_ = [placement.local(p) for p in params]
        here["locals"] = locals_
        versions = [written(p) for p in params]
        if layout.sketches is not None and versions == layout.versions and step % SPARSE:
            weights = layout.sketches  # unmodified since
        else:
            sketch = layout.sketches is None or self.settings.every > 1  # measured now: not every step is recorded
            weights = measure([t for t, _, _ in locals_], [b for _, b, _ in locals_], sketch=sketch)
        if layout.sketches is None:
            layout.sketches = here["start"] = weights
            here["shards"] = _contents([t for (t, b, _) in locals_ if b.size != b.shape])
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
            self._made_step(number)
            return
        self.flush()
        record = self._cheap(here)
        record |= {"idle": self.schedules.idle(optimizer), "schedulers": self.schedules.since(optimizer, number)}
        if (loaded := self.schedules.pop_loaded(optimizer)) is not None:
            record["loaded"] = loaded
        if self.cast_at == self.cleared:
            self.stepped_at = self.cleared
        vectors: dict[str, list[Tensor]] = {}
        if "grads" in here:
            vectors = self._measured(optimizer, here, record)
        sources = (getattr(p, "source", p) for p, _ in here["parameters"])
        own = (p if p.grad is not None else q for p, (q, _) in zip(sources, here["parameters"], strict=True))
        self.last_grads[number] = gradient_versions(own)
        self.zeroed[number] = not self.last_grads[number]
        pending = Pending(record, self.since, vectors | numbers_of(self.since, here["groups"]))
        self.pending.append(pending)
        self.since = Since()
        if not pending.on_device:
            self.flush()
        self._made_step(number)

    def _made_step(self, number: int) -> None:
        self.steps[number] += 1
        if self.operations is not None:
            self.operations.stepped(number, self.steps[number])

    def _cheap(self, here: dict[str, Any]) -> dict[str, Any]:
        number, since = here["number"], self.since
        names, _ = self.names()
        outside, late = {}, []
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
                    if id(parameter) not in names:  # created or replaced since
                        names = self.names(fresh=True)[0]
                    name = names.get(id(parameter), "?")
                    outside[name] = parameter.grad is not None
                    ref = self.late.get(id(parameter))
                    if ref is not None and ref() is parameter:
                        late.append(name)
        return {
            "opt": number,
            "step": self.steps[number],
            "layout": here["layout"].number,
            "loader": self.loader,
            "forwards": len(since.inputs),
            "backwards": since.backwards,
            "clips": since.clips,
            "notes": since.notes,
            "unscaled": since.unscaled,
            "training": since.training,
            "autocast": since.autocast,
            "groups": here["groups"],
            "outside": outside,
            "late": late,
            "mode": since.mode,
            "fed": since.fed,
            "by_scaler": self.by_scaler,
            "rewritten": here["rewritten"],
            "collectives": since.collectives,
            "stale_casts": since.stale_casts,
            "unmasked": since.unmasked,
            "cut": since.cut,
            "elsewhere": self.schedules.elsewhere(here["optimizer"]),
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
            vectors["shards"] = here["shards"]
            record["shards_of"] = [i for i, (_, b, _) in enumerate(locals_) if b.size != b.shape]
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
                if isinstance(value, Tensor) and value.shape == local_shape(p) and value.numel() > 1:
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
            *((placement.key(p), p.dtype, tuple(p.shape), p.device, p.requires_grad) for p, _ in parameters),
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
        mesh = max(meshes, key=lambda m: len(m["sizes"]), default=None)  # a layer may use only a part of the mesh
        roots = [type(r).__name__ for ref in self.roots if (r := ref()) is not None]
        self.write(
            "layout",
            id=layout.number,
            opt=number,
            optimizer=getattr(optimizer, "kind", type(optimizer).__name__),
            own=not type(optimizer).__module__.startswith("torch.optim"),
            parameters=rows,
            ties=ties,
            untied=self._untied(),
            mesh=mesh,
            models=roots,
        )
        self.layouts[number] = layout
        return layout

    def _untied(self) -> bool:
        """Return whether a transformers model declares tied embeddings that are two parameters."""
        for root in (r for ref in self.roots if (r := ref()) is not None):
            module: Any
            for module in root.modules():
                config = getattr(module, "config", None)
                if getattr(config, "tie_word_embeddings", False) and hasattr(module, "get_output_embeddings"):
                    one, other = module.get_input_embeddings(), module.get_output_embeddings()
                    weights = [getattr(m, "weight", None) for m in (one, other)]
                    if not getattr(module, "_tied_weights_keys", None):
                        return False  # the model has nothing to tie
                    return all(w is not None for w in weights) and weights[0] is not weights[1]
        return False

    def skipped(self, optimizer: Any) -> None:
        """Record a step skipped by a scaler because of nonfinite gradients."""
        number = self.number_of(optimizer)
        self.flush()
        scale = None if self.since.scale is None else float(self.since.scale)  # the scaler has synchronized already
        examples = hexed([s.hashes for s in self.since.inputs])
        self.write("skipped", opt=number, step=self.steps[number], scale=scale, examples=examples)
        self.last_grads = {}
        self.since = Since()
        if self.operations is not None:
            self.operations.skipped()

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, kind: str, **values: Any) -> None:
        if self.active:
            self.writer.write(kind, **values)

    def flush(self) -> None:
        """Write the records whose device copies are pending."""
        pending, self.pending = self.pending, []
        for each in pending:
            record, numbers = each.record, each.host()
            fill_in(record, each.since, numbers)
            for name in [n for n in numbers if n not in OF_STEP]:
                record[name] = packed(numbers[name])
            if (start := record.pop("start", None)) is not None:
                shards = {"of": record.pop("shards_of"), "content": record.pop("shards", packed([]))}
                about = {"opt": record["opt"], "step": record["step"], "layout": record["layout"]}
                self.write("start", **about, weights=start, shards=shards)
            self.write("step", **record)

    def end(self) -> None:
        """Write pending records and the end record, at a normal exit."""
        self.flush()
        if self.operations is not None:
            self.operations.finish(unfinished=True)
            self.operations.flush()
        self.end_evaluation()
        if self.steps:
            stepped = [i for i, each in enumerate(self.schedules.schedulers) if each.stepped]
            self.write("end", steps=self.steps, backwards=self.since.backwards, stepped=stepped)


def _contents(tensors: list[Tensor]) -> list[Tensor]:
    """Return position-independent measures of each local tensor, followed by those of the tensors rotated by one
    element, which are equal if all elements are."""
    tensors = [t.detach() for t in tensors]
    rotated = [t.reshape(-1).roll(1).view(t.shape) for t in tensors]
    blocks = [whole(t) for t in tensors]
    return [*measure(tensors, blocks, sketch=False), *measure(rotated, blocks, sketch=False)]


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
