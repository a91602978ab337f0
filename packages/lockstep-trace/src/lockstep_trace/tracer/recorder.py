"""Records the events of a process between optimizer steps, and writes one record per step.

In: calls from `hooks.py`. Out: records (`records.py`): process, layout, start, step, skipped, epoch, evaluation, note,
error, end. Never communicates. Device data is copied once per step and written at the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import Settings, engines, layouts, lifetimes, observers, placement
from .checker import Checker
from .evidence import Calls, notes_on
from .gradient_history import (
    LOOKED_AT,
    GradientHistory,
    GradientUse,
    Leaks,
    Terms,
    nonfinite,
    shared_with_gradients,
    watch_foreach,
    written,
)
from .graph import RATIO_LOOKS, divisors, handmade, objectives, ratios_all_one, unmasked_attention
from .inputs import (
    EVALUATED,
    SEQUENCE_LOOKS,
    TRAINED,
    CallInputs,
    call_inputs,
    hashes_of_inputs,
    random_state,
    ranges,
    sequence_shape,
    tensors_of,
    token_numbers,
)
from .layouts import UNITS_AT, Born, Layouts, Schedules, SketchedLayout, Strays
from .lifetimes import (
    Averages,
    ByHand,
    Carried,
    LoadedWeights,
    Resumes,
    StateLoads,
)
from .logits import answer_notes, attention_counts, compares_all, floats_of, logits_notes
from .modes import Evaluation, EvaluationNoise, FrozenNorms, ModelModes, Setting, UnusedNorms
from .records import (
    OF_STEP,
    SPARSE,
    Before,
    Pending,
    Since,
    Writer,
    after_step,
    before_step,
    buffers,
    fill_in,
    hexed,
    measured_gradients,
    modules,
    moments,
    numbers_of,
    options_of,
    packed,
)
from .statements import without_effect

if TYPE_CHECKING:
    from .operations import Operations

DRAWS = 16  # first steps in which the generator's state is looked at
LOOKED_FROM = 16  # backwards without a step, and each power of two of them, after which gradients are looked at
OF_SINCE = (  # values of a step's record as they are in `Since`
    *("backwards", "clips", "notes", "observed", "cleared", "means", "inputs_at", "unscaled", "training", "autocast"),
    *("mode", "fed", "collectives", "reduced_late", "stale_casts", "unmasked", "cut", "evaluated", "born", "sequences"),
    "drawn",
)
TOKEN_LOOKS = 8  # first calls and losses whose token numbers and graphs are looked at


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
        self.resumes = Resumes()
        self.steps: list[int] = []
        self.layouts = Layouts(self.write)
        self.strays = Strays()
        self.born = Born()
        self.noise = EvaluationNoise(self.write)
        self.averages = Averages()
        self.sequence_looks, self.ranged = SEQUENCE_LOOKS, 0
        self.ranged_module: Callable[[], Any] | None = None
        self.columns: list[Tensor] = []  # of the loader's last batch, at first losses
        self.classes: dict[int, Tensor] = {}  # targets of each class in first losses, by number of classes
        self.ratio_looks: float = RATIO_LOOKS[0]  # each that finds none takes one of them
        self.rates_made: dict[int, tuple[weakref.ref[Any], list[float]]] = {}  # of optimizers when made, by id
        self.modes = ModelModes()
        self.norms = FrozenNorms()
        self.unused_norms = UnusedNorms()
        self.since = Since()
        self.evaluation: Evaluation | None = None
        self.loader: str | None = None
        self.gradients = GradientHistory()
        self.use = GradientUse()
        self.leaks = Leaks()
        self.terms = Terms()
        self.state_loads = StateLoads(self.write)
        self.loaded = LoadedWeights(self.write)
        self.carried = Carried()
        self.pending: list[Any] = []
        self.perturbed = False
        self.loaders = 0
        self.batch = 0  # of `loader`
        self.datasets: list[tuple[int, Any]] = []
        self.wrappers: list[weakref.ref[Any]] = []  # DistributedDataParallel objects
        self.with_gradients = False  # in the last outermost call of a model
        self.by_scaler = False  # whether a scaler makes the step
        self.optimizers_made = 0
        self.by_hand = ByHand()
        self.arrivals = False  # gradients were written to by hand before the last step, one of the first
        self.optimizer_refs: list[weakref.ref[Any]] = []  # all that were made
        self.late: dict[int, weakref.ref[Any]] = {}  # parameters created after an optimizer
        self.late_written: dict[int, tuple[int, int]] = {}  # their (version, address) at the last step
        self.operations: Operations | None = None  # at the level `operations`
        self.cleared = 0  # how often autocast's cache was cleared
        self.cast_at = self.stepped_at = -1  # `cleared` at the last forward under autocast, and at a step after it
        self.packed_looks = self.token_looks = self.loss_looks = 0
        self.saved_hooks = False  # hooks on saved tensors were in use, as a checkpoint's
        self.floats: list[Tensor] = []  # inputs of calls since the last backward, as `called`
        self.outputs: list[Any] = []  # and their first outputs
        self.arguments: list[Tensor] = []  # tensors of the last call
        self.called: list[list[Tensor]] = []  # token numbers of calls since the last backward, at first losses
        self._names: tuple[dict[int, str], list[list[str]]] = ({}, [])

    # -- forward and backward ----------------------------------------------------------------------------------------

    def entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that the outermost module with parameters is about to be called, outside backward."""
        gradients = self.with_gradients = torch.is_grad_enabled()
        self.state_loads.called(module)
        self.loaded.called(module)
        if self.settings.perturb and not self.perturbed:
            self.perturbed = True
            placement.perturb(module)
        if gradients:
            self.step_by_hand()
            self.root(module)
        self.norms.forward(module, self.modes.norms(module), gradients)
        looks = gradients and self.token_looks < TOKEN_LOOKS
        batch = call_inputs(args, kwargs, looks)
        if looks and batch is not None and batch.tokens is not None:
            self.token_looks += 1
        if not gradients:
            self._evaluated(module, batch)
            if (now := self.evaluation) is not None and now.looks < EVALUATED and now.setting.trained:
                now.looks += 1
                now.ranges += self._ranges(module, args, kwargs)
            return
        if self.ranged < TRAINED:
            self.ranged += 1
            self.since.ranges += self._ranges(module, args, kwargs)
        training = self.modes.trains(module)
        self.since.training = training if self.since.training is None else self.since.training and training
        if self.since.mode is None:
            self.since.mode = self.modes.mode(module)
            if min(self.steps, default=0) < DRAWS or self.since.evaluated:
                self.since.drawn += random_state()
            if norms := self.modes.norms(module):
                self.since.mode["frozen"] = self.norms.undone(module, norms)
        if self.since.autocast is None and next(module.children(), None) is None:
            self.inside(module)
        if self.loss_looks < TOKEN_LOOKS:
            if self.carried.taken(module, (args, tuple(kwargs.values())), (self.loader, self.batch)):
                self.since.observed.append(("state carried", str(self.loader)))
            self.called.append(token_numbers(args, kwargs))
            self.since.parts += hashes_of_inputs(args, kwargs)
            self.floats += floats_of([*args, *kwargs.values()])
            self.arguments = [tensor for _, tensor in [*tensors_of(args), *tensors_of(kwargs)]]
        if batch is not None:
            self.since.inputs.append(batch)
            self.since.fed.append((self.loader, self.batch))

    def _ranges(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        module = placement.unwrapped(module)  # inputs of other models are on scales of their own
        first = self.ranged_module = self.ranged_module or weakref.ref(module)
        numbers = ranges(args, kwargs) if first() is module else None
        return [] if numbers is None else [numbers]

    def returned(self, module: nn.Module, result: Any) -> None:
        """Record the first output of the outermost module."""
        if self.with_gradients and self.loss_looks < TOKEN_LOOKS and len(self.outputs) < 8:
            self.outputs.append(result[0] if isinstance(result, tuple | list) and result else result)
            rows = len(self.since.inputs[-1].hashes) if self.since.inputs else 0
            self.carried.returned(module, result, (self.loader, self.batch), rows)

    def sequence(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the input shape of a recurrent layer or attention inside of a call."""
        look = sequence_shape(module, args, kwargs) if self.with_gradients and self.since.inputs else None
        if look is not None:
            self.sequence_looks -= 1
            self.since.sequences.append([*look, len(self.since.inputs[-1].hashes), self.since.fed[-1][0]])

    def inside(self, module: nn.Module) -> None:
        """Record the autocast state at the first inner module: wrappers enable autocast before it."""
        device = "cuda" if torch.cuda.is_available() and torch.is_autocast_enabled("cuda") else "cpu"
        on = torch.is_autocast_enabled(device)
        self.since.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else ""
        if on and torch.is_autocast_cache_enabled() and torch.is_grad_enabled():
            if self.stepped_at == self.cleared:
                self.since.stale_casts = placement.cast_weights(self.models())
            self.cast_at = self.cleared

    def root(self, module: nn.Module) -> None:
        if all(ref() is not module for ref in self.roots):
            self.roots = [ref for ref in self.roots if ref() is not None]
            self.roots.append(weakref.ref(module))
            self.token_looks = self.loss_looks = 0
            if any(placement.is_dtensor(p) for p in module.parameters()):
                watch_foreach()
            self._names = ({}, [])
            self.write(
                "model",
                name=type(module).__name__,
                origin=type(placement.unwrapped(module)).__module__.partition(".")[0],
                wrappers=placement.kinds_of(module),
                fsdp=placement.is_fsdp(module),
                training=self.modes.trains(module),
                stochastic=placement.has_stochastic(module),
                dropout=placement.has_dropout(module),
                repeated=layouts.repeated(module),
                adapters=layouts.adapters(module),
                odd=layouts.odd_settings(module),
                number=len(self.roots) - 1,
                group=placement.replicas_of(module, self.wrappers),
            )

    def models(self) -> list[nn.Module]:
        """Return the outermost modules called so far that still exist."""
        return [root for ref in self.roots if (root := ref()) is not None]

    def _evaluated(self, module: nn.Module, batch: CallInputs | None) -> None:
        first = next(module.parameters(), None)
        trained = first is not None and id(first) in self.names()[0]
        between = len(self.since.inputs) > self.since.backwards
        setting = Setting(type(module).__name__, self.loader, self.modes.trains(module), trained, between)
        self.since.evaluated |= trained and not self.since.inputs
        if self.evaluation is None or self.evaluation.setting != setting:
            self.end_evaluation()
            active = placement.stochastic(module)[:20]
            if not trained:
                self.averages.called.add(module)
            if trained:
                self.since.evaluated_at = {id(p): written(p) for p in module.parameters()}
            self.evaluation = Evaluation(setting, active, self.modes.mode(module), self._trainers(module))
            if trained and not between:
                self.evaluation.drawn = random_state()
            if not trained and any(self.steps):
                self.evaluation.unused_norms = self.unused_norms.look(module)
        if batch is not None:
            self.evaluation.add(batch)

    def _trainers(self, module: nn.Module) -> list[int]:
        own = {id(p) for p in module.parameters()}
        optimizers = ((n, o) for n, ref in enumerate(self.optimizers) if (o := ref()) is not None)
        return [n for n, o in optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])]

    def end_evaluation(self) -> None:
        """Record the evaluation in progress, if any."""
        now, self.evaluation = self.evaluation, None
        if now is not None and now.count:
            self.write("evaluation", **now.record(), steps=list(self.steps))

    def backward(self, tensors: Any, scaled: bool, whole: bool = True) -> None:
        """Record that `backward` is about to be called on tensors. `whole`: without inputs or gradients given."""
        if not isinstance(tensors, Tensor):
            tensors = tensors[0] if len(tensors) == 1 else None
        loss: Tensor | None = tensors
        if not self.optimizers_made and loss is not None:
            self.step_by_hand(self.by_hand.reads(loss, self.models()))
        self.leaks.before_backward(self._stepping())
        if self.evaluation is not None and self.since.inputs:
            self.end_evaluation()
        if len(self.since.drawn) == 1:
            self.since.drawn += random_state()
        self.gradients.before_backward(self.steps)
        cleared = self.use.before_backward(self.gradients.after)
        if not (self.since.backwards or cleared):
            self.since.reduced_late = 0  # the next step may use them
        cleared = cleared and self.since.backwards > 0
        self.since.cleared += cleared
        self.since.backwards += 1
        if (count := self.since.backwards) >= LOOKED_FROM and not count & (count - 1):
            self.since.nonfinite = nonfinite(self._stepping().values(), self.since.losses)
        self.since.inputs_at.append(len(self.since.inputs))
        if not cleared and loss is not None and any(ref() is loss for ref in self.since.twice):
            self.since.notes.append("backward twice")
        self.since.twice = [weakref.ref(loss)] if whole and loss is not None else []
        if loss is not None and placement.is_plain_tensor(loss) and loss.numel() == 1:
            self.since.losses.append((loss.detach().reshape(()).clone(), scaled))
            self.since.objectives += objectives(loss)
            self._divided(loss)
            if self.ratio_looks > 0 and not self.saved_hooks:
                one = ratios_all_one(loss)
                self.ratio_looks -= 1 if one is None else 1 / RATIO_LOOKS[1]
                self.since.ratios += [] if one is None else [one]
            if self.loss_looks < TOKEN_LOOKS:
                self.loss_looks += 1
                wide = {str(n) for tensor in self.arguments for n in tensor.shape[1:]}  # as long as the batch
                self.since.observed += [note for note in handmade(loss) if note[1] not in wide]
                self._look(loss)
                self.since.born += self.born.in_graph(loss, self.strays.look(loss, self.models()), self.models())
                if not self.saved_hooks and (look := attention_counts(loss, self.called)) is not None:
                    self.since.attention.append(look)
        self.called, self.floats, self.outputs, self.arguments = [], [], [], []
        if loss is not None and self.packed_looks < 2 and any(s.restarts is not None for s in self.since.inputs):
            self.packed_looks += 1
            self.since.unmasked = unmasked_attention(loss)

    def _divided(self, loss: Tensor) -> None:
        mean, numbers = divisors(loss)
        self.since.means += mean and not numbers
        if mean and len(numbers) > 1 and numbers[0] == numbers[1] > 1:
            how = "divided twice" if all(isinstance(n, int) for n in numbers[:2]) else "weighted"
            self.since.notes.append(f"{how} by {numbers[0]:g}")

    def _look(self, loss: Tensor) -> None:
        self.since.notes += ["own loss of a Trainer"] if lifetimes.own_loss_of_a_trainer() else []
        pairs = compares_all(loss, self.columns) if self.columns else None
        notes: list[tuple[Any, Tensor | None]] = [] if pairs is None else [(("spread over targets", ""), pairs)]
        if not self.saved_hooks:
            drawn = loss.device.type != "cpu" or len(set(self.since.drawn)) != 1
            rows_ = len(self.since.inputs[-1].hashes) if self.since.inputs else 0
            calls = Calls(self.models(), self.outputs, rows_, self.arguments)
            later = self.since.noted.append
            notes += notes_on(loss, calls, self.columns, self.classes, lambda note, holds: later((note, holds)))
            notes += [*logits_notes(loss), *answer_notes(loss, self.floats, drawn)]
            notes += self.terms.look(loss, {id(o): o for ref in self.optimizer_refs if (o := ref()) is not None})
        self.since.observed += [note for note, holds in notes if holds is None]
        self.since.noted += [(note, holds) for note, holds in notes if holds is not None]

    def after_backward(self) -> None:
        """Record that `backward` has returned."""
        self.gradients.after_backward(self.models())
        self.leaks.after_backward(self._stepping())
        if not self.optimizers_made:
            self.by_hand.arrived()
        if self.arrivals and self.measures():
            self.since.arrived = self._arrived()

    def _stepping(self) -> dict[int, Any]:
        return {n: o for n, ref in enumerate(self.optimizers) if (o := ref()) is not None}

    def _arrived(self) -> dict[Any, Tensor]:
        optimizers = [o for ref in self.optimizers if (o := ref()) is not None]
        params = self.parts(p for o in optimizers for group in o.param_groups for p in group["params"])
        present = [p for p in params if p.grad is not None]
        return dict(zip(map(placement.key, present), measured_gradients(present, sketch=False), strict=True))

    def scaled(self, scale: Tensor) -> None:
        """Record the scale of a loss that a scaler multiplied."""
        self.since.scale = scale.detach().clone()

    def collective(self, name: str, elements: int, first: Any = None) -> None:
        """Count a call of a torch.distributed collective. `first`: its first argument."""
        if name == "all_reduce" and not self.since.backwards and 0 < min(self.steps, default=0) < DRAWS:
            grads = [p.grad for o in self._stepping().values() for g in o.param_groups for p in g["params"]]
            plain = placement.is_plain_tensor(first) and first.layout == torch.strided
            own = [g for g in grads if plain and placement.is_plain_tensor(g) and g.shape == first.shape]
            self.since.reduced_late += any(g.data_ptr() == first.data_ptr() != 0 for g in own)
        row = self.since.collectives.setdefault(name, [0, 0])
        row[0] += 1
        row[1] += elements

    def seeded(self, name: str, value: Any) -> None:
        """Record that numpy's or Python's generator was seeded; several values in one step are none."""
        before = self.since.seeds.get(name, (repr(value), ""))[0]
        value = repr(value) if repr(value) == before else None
        self.since.seeds[name] = value, observers.generator_states().get(name) if value else None

    # -- clipping, scaling, schedules --------------------------------------------------------------------------------

    def clipping(self, parameters: list[Tensor], how: str, limit: Any) -> dict[str, Any]:
        """Record a clipping before it runs, and return the record, to which the caller adds `norm`."""
        grads = [p for p in self.parts(parameters) if p.grad is not None]
        clip: dict[str, Any] = {"how": how, "limit": lifetimes.number(limit), "backwards": self.since.backwards}
        clip["of"], clip["given"] = len(grads), len(parameters)
        clip |= {"outside": True} if self.gradients.covers(parameters) else {}
        if self.since.scale is not None and not self.since.unscaled:
            clip["scaled"] = True  # unless the scale turns out to be 1
        self.since.clips.append(clip)
        self.since.rewritten = self.since.rewritten or self.gradients.rewritten()
        clip["rewritten"] = self.since.rewritten
        if self.measures() and grads:
            self.since.clipped = dict(zip(map(placement.key, grads), measured_gradients(grads), strict=True))
        return clip

    def has_clipped(self, clip: dict[str, Any], parameters: list[Tensor]) -> None:
        """Record that a clipping has returned."""
        self.gradients.has_clipped(clip, parameters)
        self.use.has_clipped(clip, parameters)

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

    def saves_state(self, optimizer: Any) -> None:
        """Record that an optimizer's state was read by `state_dict`, if the optimizer has stepped."""
        number = next((n for n, ref in enumerate(self.optimizers) if ref() is optimizer), None)
        if number is not None:
            self.resumes.saves(number, optimizer, self.steps[number])

    def parts(self, parameters: Iterable[Any]) -> list[Any]:
        """Return the parameters themselves, or the parts of them in a rank's shard."""
        return [part for parts in engines.expanded(parameters, self.models()) for part in parts]

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
            self._names = placement.named_parameters(self.models())
        return self._names

    def step_by_hand(self, anew: bool = False) -> None:
        """Record a step of the script's statements if they wrote to parameters since the last backward, or replaced
        them (`anew`)."""
        if self.since.backwards and not self.optimizers_made and (self.by_hand.wrote() or anew):
            self.since.observed += [("ascends", "")] if self.by_hand.ascends else []
            self.after_step(self.by_hand, self.before_step(self.by_hand))

    def before_step(self, optimizer: Any) -> dict[str, Any]:
        """Measure gradients and weights before a step, and return the values that `after_step` needs."""
        number = self.number_of(optimizer)
        step = self.steps[number]
        self.since.noted += self.leaks.stepped(number)
        if self.settings.steps is not None and step >= self.settings.steps:
            self.flush()
            return {"number": number, "optimizer": optimizer, "skip": True}
        groups_ = enumerate(optimizer.param_groups)
        parameters = [(p, g) for g, group in groups_ for p in self.parts(group["params"])]
        named = self.names(fresh=step % 16 == 0)
        memory = placement.one_memory([p for p, _ in parameters], named[0]) if step == 1 else []
        if number == 0 and self.measures(step):
            self.since.averages = self.averages.measured(step, self.models(), {id(p) for p, _ in parameters})
        if step == UNITS_AT:
            self.since.alike = layouts.units_alike(self.models())
        layout = self.layouts.of(optimizer, number, parameters, named, self.models())
        if 0 < step < LOOKED_AT and self.use.zeroed_before and shared_with_gradients(optimizer):
            self.since.notes.append("state cleared")
        groups = [options_of(group) for group in optimizer.param_groups]  # a scheduler changes them after the step
        here: dict[str, Any] = {
            "number": number,
            "layout": layout,
            "optimizer": optimizer,
            "parameters": parameters,
            "groups": groups,
            "one_memory": memory,
        }
        if step and self.gradients.added_to(number):
            self.since.notes.append(f"not zeroed: {number}")
        if step == 0 and (resume := self.resumes.at_first_step(number, optimizer)) is not None:
            here["resume"] = resume
        if self.gradients.is_stale(number, optimizer):
            self.since.notes.append(f"stale gradient: {number}")
        if step == 1:
            self.loaded.stepped(self.models())
            if self.since.backwards == 1 and (count := lifetimes.unset_accumulation()) is not None:
                self.write("fact", fact="accumulation unset", argument=str(count))
        if lifetimes.accumulates():
            self.since.observed.append(("step while accumulating", ""))
        self.since.observed += observers.undivided_sums(self.since, optimizer, [p for p, _ in parameters])
        here["lost"] = lifetimes.lost_updates(optimizer, [p for p, _ in parameters], step)
        here["rewritten"] = self.since.rewritten or self.gradients.rewritten()
        self.arrivals = bool(here["rewritten"]) and not self.since.clips and step < LOOKED_AT
        if not self.measures(step) or optimizer is self.by_hand:
            return here
        here["measured"] = self._measure(number, layout, [p for p, _ in parameters])
        scale = getattr(optimizer, "grad_scale", None)
        here["grad_scale"] = None if scale is None else scale.detach().reshape(-1)[:1].clone()
        return here

    def _measure(self, number: int, layout: SketchedLayout, params: list[Any]) -> Before:
        step, clips = self.steps[number], self.since.clips
        sparse = step % SPARSE == 0
        again = clips and not any(c.get("early") for c in clips)
        present = [p for p in params if p.grad is not None]
        known = step >= LOOKED_AT and not sparse and self.gradients.factors.known(number, clips, present)
        known = known and any(clip is clips[0] for clip, _ in self.since.norms)
        unclipped = self.since.clipped if again else {}
        often, at = self.settings.every == 1, self.since.evaluated_at
        evaluated = self.since.evaluated and (not at or any(id(getattr(p, "source", p)) in at for p in params))
        return before_step(layout, params, unclipped, known, fresh=sparse, often=often, evaluated=evaluated)

    def after_step(self, optimizer: Any, here: dict[str, Any]) -> None:
        number = here["number"]
        if here.get("skip"):
            self.since = Since()
            self._made_step(number)
            return
        self.flush()
        record = self._cheap(here)
        record["one_memory"] = here["one_memory"]
        if "resume" in here:
            record["resume"] = here["resume"]
        record |= {"idle": self.schedules.idle(optimizer), "schedulers": self.schedules.since(optimizer, number)}
        if (loaded := self.schedules.pop_loaded(optimizer)) is not None:
            record["loaded"] = loaded | {"read": self.resumes.from_file}
        if self.cast_at == self.cleared:
            self.stepped_at = self.cleared
        vectors: dict[str, list[Tensor]] = {}
        if "measured" in here:
            vectors = self._measured(optimizer, here, record)
        if here["lost"] is not None:
            self.since.noted.append((("updates lost", ""), here["lost"]()))
        sources = (getattr(p, "source", p) for p, _ in here["parameters"])
        own = (p if p.grad is not None else q for p, (q, _) in zip(sources, here["parameters"], strict=True))
        self.gradients.stepped(number, () if optimizer is self.by_hand and here["rewritten"] else own)
        if self.steps[number] == 0:
            self.loaded.knows(p for p, _ in here["parameters"] if p.requires_grad)
        self.use.stepped([getattr(p, "source", p) for p, _ in here["parameters"]])
        pending = Pending(record, self.since, vectors | numbers_of(self.since, here["groups"]))
        self.pending.append(pending)
        self.since = Since()
        if not pending.on_device:
            self.flush()
        self._made_step(number)

    def _made_step(self, number: int) -> None:
        self.terms.stepped.add(id(self.optimizers[number]()))
        self.steps[number] += 1
        if self.operations is not None:
            self.operations.stepped(number, self.steps[number])

    def _cheap(self, here: dict[str, Any]) -> dict[str, Any]:
        number, since = here["number"], self.since
        names, _ = self.names()
        generators = observers.generator_states() if since.seeds else {}
        outside, late, piled = {}, [], []
        groups = [group for o in self._stepping().values() for group in o.param_groups]
        optimized = {id(getattr(p, "source", p)) for group in groups for p in group["params"]}
        if self.loss_looks < TOKEN_LOOKS or self.steps[number] % SPARSE == 0:
            since.bare = self.strays.bare(optimized | self.in_optimizers())
        for root in self.models():
            for parameter in root.parameters():
                if parameter.requires_grad and id(parameter) not in optimized:
                    if id(parameter) not in names:  # created or replaced since
                        names = self.names(fresh=True)[0]
                    name = names.get(id(parameter), "?")
                    outside[name] = parameter.grad is not None
                    if self.gradients.piles_up(parameter, since.backwards, since.clips):
                        piled.append(name)
                    if self._is_late(parameter):
                        late.append(name)
        return (
            {name: getattr(since, name) for name in OF_SINCE}
            | {
                "opt": number,
                "step": self.steps[number],
                "layout": here["layout"].number,
                "loader": self.loader,
                "forwards": len(since.inputs),
                "groups": here["groups"],
                "outside": outside,
                "late": late,
                "piled": piled,
                "by_scaler": self.by_scaler,
                "rewritten": here["rewritten"],
                "seeds": [[n, value, state != generators.get(n)] for n, (value, state) in since.seeds.items()],
                "loaded_model": since.loaded,
                "closure": bool(here.get("closure")),
                "unregistered": self.strays.with_gradients(optimized),
                "elsewhere": self.schedules.elsewhere(here["optimizer"]),
                "unread_rate": layouts.unread_rate(here["optimizer"]),
            }
            | self._rates_of(here["optimizer"])
        )

    def _rates_of(self, optimizer: Any) -> dict[str, Any]:
        ref, rates = self.rates_made.pop(id(optimizer), (None, []))
        return {"rates_made": rates} if ref is not None and ref() is optimizer else {}

    def in_optimizers(self) -> set[int]:
        """Return the ids of the parameters of all optimizers created, whether or not they have stepped."""
        alive = (o for ref in self.optimizer_refs if (o := ref()) is not None)
        return {id(p) for o in alive for g in o.param_groups for p in g["params"]}

    def _is_late(self, parameter: Any) -> bool:
        ref = self.late.get(id(parameter))
        if ref is None or ref() is not parameter:
            return False
        before, now = self.late_written.get(id(parameter)), written(parameter)
        self.late_written[id(parameter)] = now
        if before is not None and before != now:
            del self.late[id(parameter)]
            return False
        return True

    def _measured(self, optimizer: Any, here: dict[str, Any], record: dict[str, Any]) -> dict[str, list[Tensor]]:
        params = [p for p, _ in here["parameters"]]
        vectors = after_step(here["layout"], here["measured"], params, record)
        if here["grad_scale"] is not None:
            vectors["grad_scale"] = [here["grad_scale"].double().view(torch.int64)]
        record["moments_of"], vectors["moments"] = [], []
        if self.steps[here["number"]] % SPARSE == 0:
            vectors["moments"] = moments(optimizer, params, record)
        arrived = [self.since.arrived.get(placement.key(p)) for p in params if p.grad is not None]
        if arrived and all(v is not None for v in arrived):
            vectors["arrived"] = [v for v in arrived if v is not None]
        vectors["buffers"] = buffers(self.models(), record)
        return vectors | modules(self.since, record)

    def skipped(self, optimizer: Any) -> None:
        """Record a step skipped by a scaler because of nonfinite gradients."""
        number = self.number_of(optimizer)
        self.flush()
        scale = None if self.since.scale is None else float(self.since.scale)  # the scaler has synchronized already
        examples = hexed([s.hashes for s in self.since.inputs])
        self.write("skipped", opt=number, step=self.steps[number], scale=scale, examples=examples)
        self.gradients.last = {}
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
            self.gradients.factors.compare_unclipped(record["opt"], record, numbers)
            for name in [n for n in numbers if n not in OF_STEP]:
                record[name] = packed(numbers[name])
            if (start := record.pop("start", None)) is not None:
                shards = {"of": record.pop("shards_of"), "content": record.pop("shards", packed([]))}
                about = {"opt": record["opt"], "step": record["step"], "layout": record["layout"]}
                self.write("start", **about, weights=start, shards=shards)
            self.write("step", **record)

    def end(self) -> None:
        """Write pending records and the end record, at a normal exit."""
        self.step_by_hand()
        self.flush()
        if self.operations is not None:
            self.operations.finish(unfinished=True)
            self.operations.flush()
        self.end_evaluation()
        if self.steps:
            stepped = [i for i, each in enumerate(self.schedules.schedulers) if each.stepped]
            plateaus = [each.watched for each in self.schedules.schedulers if each.watched]
            ends = {"stepped": stepped, "plateaus": plateaus, "lengths": self.schedules.lengths(self.steps)}
            counts = self.since.nonfinite
            ends["nonfinite"] = None if counts is None else [*counts.tolist(), len(self.since.clips)]
            ends["idle"] = without_effect()
            self.write("end", steps=self.steps, backwards=self.since.backwards, **ends)
        self.writer.close()
