"""The tracer's main wrappers and hooks. Each calls the recorder and the wrapped function. An error in the recorder
becomes a record and a warning, and never propagates to the script.

Wrapped: `Module.__call__`, `torch.autograd.backward`, `GradScaler.scale`, `unscale_` and `step`, `clip_grad_norm_` and
its like, schedulers' `__init__` and `step`, `DataLoader.__iter__`. Hooks of torch: before and after every optimizer's
step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import engines, layouts, observers
from .fingerprint import measure, whole
from .inputs import RECURRENT
from .logits import columns
from .placement import is_plain_tensor, local, plain_name
from .recorder import TOKEN_LOOKS as LOOKS
from .recorder import Recorder
from .records import warn

_THREAD = threading.local()


def working() -> bool:
    """Return whether this thread is running the tracer's own code, whose operations are not the script's."""
    return bool(getattr(_THREAD, "working", 0))


class Hooks:
    """All hooks of a process, installed once; they record into `recorder` while it is set."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.releases = observers.Releases()
        self.backward_depth = 0
        self.failed = False
        self.replaying = False  # a checked step is recomputed on copies
        self.engine_steps = False  # an engine is in its step, which contains its inner optimizers' steps
        self._stepping: dict[int, dict[str, Any]] = {}
        self._scaled: Any = None

    def guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `work`, or None if it fails."""
        if self.recorder is None:
            return None
        _THREAD.working = getattr(_THREAD, "working", 0) + 1
        try:
            return work(*args)
        except Exception as error:
            self.recorder.write("error", text=f"{type(error).__name__}: {error}", stack=traceback.format_exc()[-2000:])
            if not self.failed:
                self.failed = True
                warn(f"internal error of the tracer, the trace is incomplete: {type(error).__name__}: {error}")
            return None
        finally:
            _THREAD.working -= 1

    def inside(self) -> bool:
        """Return whether this thread is inside of an outermost module's forward."""
        return bool(getattr(_THREAD, "depth", 0)) and not torch.compiler.is_compiling()

    def install(self) -> None:
        _wrap_call(self)
        _wrap_backward(self)
        _wrap_clipping(self)
        _wrap_scaler(self)
        _wrap_schedulers(self)
        _wrap_loader(self)
        observers.install(self)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)

    @contextlib.contextmanager
    def clipping(self) -> Iterator[None]:
        """Return a context manager for clipping that is already recorded, so that nested calls are not recorded
        again."""
        _THREAD.clipping = True
        try:
            yield
        finally:
            _THREAD.clipping = False

    # -- optimizers --------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.recorder is None or self.engine_steps or id(optimizer) in self._stepping:
            return None
        if self._stepping and self.guarded(self._is_part, optimizer):
            return None
        self._stepping[id(optimizer)] = {}
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 and callable(args[1]) else None)
        if closure is None and self.guarded(self._makes_state, optimizer):
            return None
        if closure is None:
            self._stepping[id(optimizer)] = self._measured(optimizer)
            return None

        @functools.wraps(closure)
        def wrapped(*values: Any, **named: Any) -> Any:  # gradients exist after the last of several calls
            result = closure(*values, **named)
            if self.recorder is not None:
                first = self._stepping.get(id(optimizer), {}).get("measured")
                here = self._measured(optimizer) | {"closure": True}
                if first is not None and "measured" in here:  # weights before the step come from the first call
                    weights = {"weights": first.weights, "start": first.start, "shards": first.shards}
                    here["measured"] = dataclasses.replace(here["measured"], **weights)
                self._stepping[id(optimizer)] = here
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _measured(self, optimizer: Any) -> dict[str, Any]:
        assert self.recorder is not None
        here: dict[str, Any] = self.guarded(self.recorder.before_step, optimizer) or {}
        if self.recorder.checker is not None and here:
            self.guarded(self.recorder.checker.at_step, optimizer, here)
        return here

    def _is_part(self, optimizer: Any) -> bool:
        outer = [here["optimizer"] for here in self._stepping.values() if "optimizer" in here]
        own = layouts.parameters_of(optimizer)
        return any(id(optimizer) in layouts.inside(o) and own <= layouts.parameters_of(o) for o in outer)

    def _makes_state(self, optimizer: Any) -> bool:
        if optimizer.state or self.recorder is None or self.recorder.since.backwards:
            return False
        if all("lr" in group and float(group["lr"]) == 0 for group in optimizer.param_groups):
            return True
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return bool(grads) and not self.recorder.roots and not any(bool(local(g)[0].count_nonzero()) for g in grads)

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        here = self._stepping.pop(id(optimizer), None)
        if self.recorder is not None and here:
            if self.recorder.checker is not None:
                self.guarded(self.recorder.checker.after_step, optimizer)
            self.guarded(self.recorder.after_step, optimizer, here)


def _wrap_call(hooks: Hooks) -> None:
    original = nn.Module.__call__

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        if recorder is None or torch.compiler.is_compiling() or hooks.backward_depth:
            return original(module, *args, **kwargs)
        depth = getattr(_THREAD, "depth", 0)
        if depth:
            if recorder.since.autocast is None:
                hooks.guarded(recorder.inside, module)
            if recorder.sequence_looks > 0 and isinstance(module, RECURRENT):
                hooks.guarded(recorder.sequence, module, args, kwargs)
            if recorder.checker is not None and recorder.checker.current is not None:
                hooks.guarded(recorder.checker.inside, module)
            if recorder.settings.level == "modules" and torch.is_grad_enabled():
                return _observed(hooks, module, original(module, *args, **kwargs))
            return original(module, *args, **kwargs)
        if next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        hooks.guarded(engines.install_fsdp1, hooks)
        hooks.guarded(recorder.entered, module, args, kwargs)
        checker = recorder.checker
        checked = None if checker is None else hooks.guarded(checker.before_call, module, args, kwargs)
        evaluates = not recorder.with_gradients and any(recorder.steps)
        mode = hooks.guarded(recorder.noise.begin, module) if evaluates else None
        _THREAD.depth = 1
        try:
            with mode or contextlib.nullcontext():
                result = original(module, *args, **kwargs)
        finally:
            _THREAD.depth = 0
        if evaluates:
            hooks.guarded(recorder.noise.end, module, mode)
        hooks.guarded(recorder.returned, module, result)
        if checker is not None and checked is not None:
            hooks.guarded(checker.after_call, checked, (args, kwargs), result)
        return result

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _observed(hooks: Hooks, module: nn.Module, output: Any) -> Any:
    recorder = hooks.recorder
    assert recorder is not None

    def received(name: str, since: Any, gradient: Any) -> None:
        if is_plain_tensor(gradient):
            sketch = measure([gradient], [whole(gradient)])[0]
            since.returned.append((plain_name(name), sketch, tuple(gradient.shape)))

    def observe() -> None:
        first = output
        while isinstance(first, tuple | list) and first:
            first = first[0]
        if is_plain_tensor(first) and first.is_floating_point() and recorder.measures():
            name = next(
                (n for r in recorder.roots if (m := r()) is not None for n, s in m.named_modules() if s is module), None
            )
            if name is not None:
                recorder.since.modules.append(
                    (plain_name(name), measure([first], [whole(first)])[0], tuple(first.shape))
                )
                if first.requires_grad:
                    since = recorder.since
                    first.register_hook(lambda gradient: hooks.guarded(received, name, since, gradient))

    hooks.guarded(observe)
    return output


def _wrap_backward(hooks: Hooks) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        if recorder is None or torch.compiler.is_compiling():
            return original(tensors, *args, **kwargs)
        if not hooks.backward_depth:
            scaled = hooks._scaled is tensors or hooks._scaled is _first(tensors)
            whole_ = kwargs.get("inputs") is None and len(args) < 5 and (args or (None,))[0] is None
            whole_ = whole_ and kwargs.get("grad_tensors") is None
            hooks.guarded(recorder.backward, tensors, scaled, whole_)
            if recorder.checker is not None:
                hooks.guarded(recorder.checker.before_backward, tensors)
        depth, hooks.backward_depth = getattr(_THREAD, "depth", 0), hooks.backward_depth + 1
        try:
            return original(tensors, *args, **kwargs)
        finally:
            hooks.backward_depth -= 1
            if not hooks.backward_depth:
                hooks.guarded(recorder.after_backward)
            _THREAD.depth = depth  # checkpointing ends a forward by an exception

    torch.autograd.backward = backward


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else None


def _wrap_clipping(hooks: Hooks) -> None:
    def wrap(name: str, limit: str) -> None:
        original = getattr(torch.nn.utils, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = hooks.recorder
            if recorder is None or getattr(_THREAD, "clipping", False):
                return original(parameters, *args, **kwargs)
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            value = kwargs.get(limit, args[0] if args else None)
            record = hooks.guarded(recorder.clipping, parameters, name, value)
            with hooks.clipping():
                result = original(parameters, *args, **kwargs)
            if record is not None:
                hooks.guarded(recorder.has_clipped, record, parameters)
            if record is not None and is_plain_tensor(result):
                hooks.guarded(lambda: recorder.since.norms.append((record, result.detach().clone())))
            return result

        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            if getattr(module, name, None) is original:
                setattr(module, name, clip)

    wrap("clip_grad_norm_", "max_norm")
    wrap("clip_grads_with_norm_", "max_norm")
    wrap("clip_grad_value_", "clip_value")


def _wrap_scaler(hooks: Hooks) -> None:
    kind = torch.amp.GradScaler
    scale, unscale, step = kind.scale, kind.unscale_, kind.step

    @functools.wraps(scale)
    def scale_(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        if hooks.recorder is not None and self.is_enabled():
            hooks.guarded(hooks.recorder.scaled, self._scale)  # `get_scale` would synchronize
            hooks._scaled = result
        return result

    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: Any) -> Any:
        if hooks.recorder is not None:
            hooks.recorder.since.unscaled = True
        return unscale(self, optimizer)

    @functools.wraps(step)
    def step_(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        inner = layouts.stepping(optimizer)
        if recorder is None or not self.is_enabled():
            return step(self, optimizer, *args, **kwargs)
        if not recorder.since.unscaled:
            recorder.since.notes.append("scaler unscales")
        before = recorder.steps[recorder.number_of(inner)]
        recorder.by_scaler = True
        try:
            result = step(self, optimizer, *args, **kwargs)
        finally:
            recorder.by_scaler = False
        if recorder.steps[recorder.number_of(inner)] == before:
            hooks.guarded(recorder.skipped, inner)
        return result

    kind.scale, kind.unscale_, kind.step = scale_, unscale_, step_  # type: ignore[method-assign]


def _wrap_schedulers(hooks: Hooks) -> None:
    module = torch.optim.lr_scheduler
    for kind in [k for k in vars(module).values() if isinstance(k, type) and "step" in vars(k)]:
        _wrap_step(hooks, kind)
    original_init = module.LRScheduler.__init__

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for kind in type(self).__mro__:  # custom classes may not call torch's `step`
            if isinstance(vars(kind).get("step"), types.FunctionType):
                _wrap_step(hooks, kind)
            if isinstance(vars(kind).get("load_state_dict"), types.FunctionType):
                _wrap_load(hooks, kind)
        original_init(self, *args, **kwargs)
        if hooks.recorder is not None:
            hooks.guarded(hooks.recorder.schedules.register, self, _by_a_trainer(sys._getframe(1)))

    module.LRScheduler.__init__ = init  # type: ignore[method-assign]


OWNERS = ("lightning", "pytorch_lightning", "transformers.trainer")


def _by_a_trainer(frame: Any) -> bool:
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name in OWNERS or name.startswith(tuple(f"{owner}." for owner in OWNERS)):
            return True
        frame = frame.f_back
    return False


def _wrap_step(hooks: Hooks, kind: Any) -> None:
    original: Any = kind.step
    if hasattr(original, "lockstep_wrapped"):
        return

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        caller = sys._getframe(1)
        if recorder is None or caller.f_code.co_name in ("__init__", "_initial_step"):
            return original(self, *args, **kwargs)
        by = "accelerate" if str(caller.f_globals.get("__name__", "")).startswith("accelerate.") else ""
        inner = getattr(_THREAD, "scheduling", False)
        hooks.guarded(recorder.schedules.stepped, self, by, not inner)
        if inner:
            return original(self, *args, **kwargs)
        _THREAD.scheduling = True
        try:
            result = original(self, *args, **kwargs)
        finally:
            _THREAD.scheduling = False
        if isinstance(self, torch.optim.lr_scheduler.ReduceLROnPlateau) and (args or "metrics" in kwargs):
            score = args[0] if args else kwargs["metrics"]
            hooks.guarded(recorder.schedules.watches, self, score, recorder.steps)
        return result

    step.lockstep_wrapped = True  # type: ignore[attr-defined]
    kind.step = step


def _wrap_load(hooks: Hooks, kind: Any) -> None:
    original: Any = kind.load_state_dict
    if hasattr(original, "lockstep_wrapped"):
        return

    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if hooks.recorder is not None:
            hooks.guarded(hooks.recorder.schedules.resumes, self)
        return result

    load.lockstep_wrapped = True  # type: ignore[attr-defined]
    kind.load_state_dict = load


def _wrap_loader(hooks: Hooks) -> None:
    kind = torch.utils.data.DataLoader
    original = kind.__iter__
    wrapped: dict[type, None] = {}

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        own = getattr(self, "worker_init_fn", None)
        watched = hooks.guarded(_watched, hooks, self)
        if watched is not None:
            self.worker_init_fn = watched  # while workers start
        try:
            iterator = original(self)
        finally:
            if watched is not None:
                self.worker_init_fn = own
        if hooks.recorder is not None:
            hooks.guarded(_began, hooks.recorder, self, iterator)
            if type(iterator) not in wrapped:
                wrapped[type(iterator)] = None
                _wrap_next(hooks, type(iterator))
        return iterator

    kind.__iter__ = iterate  # type: ignore[method-assign]


def _watched(hooks: Hooks, loader: Any) -> Any:
    recorder = hooks.recorder
    assert recorder is not None
    number = getattr(loader, "lockstep_number", recorder.loaders + 1)
    name = f"{number}.{getattr(loader, 'lockstep_passes', 0)}"
    return observers.watched(loader, recorder.write, name)


def _wrap_next(hooks: Hooks, kind: Any) -> None:
    original = kind.__next__

    def following(self: Any) -> Any:
        recorder, name = hooks.recorder, getattr(self, "lockstep_name", None)
        try:
            batch = original(self)
        except StopIteration:
            if recorder is not None and name is not None:
                batches = getattr(self, "lockstep_batches", 0)
                recorder.write("epoch end", loader=name, steps=list(recorder.steps), batches=batches)
            raise
        if recorder is not None and name is not None:
            recorder.loader, recorder.batch = name, getattr(self, "lockstep_batches", 0)
            recorder.columns = columns(batch) if recorder.loss_looks < LOOKS else []
            self.lockstep_batches = recorder.batch + 1
        return batch

    kind.__next__ = functools.wraps(original)(following)


def _began(recorder: Recorder, loader: Any, iterator: Any) -> None:
    number = getattr(loader, "lockstep_number", None)
    if number is None:
        number = recorder.loaders = recorder.loaders + 1
        object.__setattr__(loader, "lockstep_number", number)
    passes = getattr(loader, "lockstep_passes", 0)
    object.__setattr__(loader, "lockstep_passes", passes + 1)
    iterator.lockstep_name = f"{number}.{passes}"
    sampler = getattr(loader, "sampler", None)
    batches: Any = getattr(loader, "batch_sampler", None)
    outer = batches  # Accelerate's, of a loader that it divides among ranks
    skips = bool(getattr(loader, "skip_batches", 0))
    while getattr(batches, "batch_sampler", None) is not None:  # Accelerate wraps it to shard and to skip batches
        skips = skips or bool(getattr(batches, "skip_batches", 0))
        batches = batches.batch_sampler
    inner = getattr(batches, "sampler", sampler)
    recorder.write(
        "epoch",
        loader=iterator.lockstep_name,
        kind_of=" ".join(f"{type(each).__module__}.{type(each).__name__}" for each in (loader, outer)),
        sampler=type(inner).__name__,
        shuffle=getattr(inner, "shuffle", type(inner).__name__ in ("RandomSampler", "SeedableRandomSampler")),
        replacement=bool(getattr(inner, "replacement", False)),
        epoch=getattr(inner, "epoch", None),
        weights=observers.weights_of(inner),
        replicas=getattr(inner, "num_replicas", None),
        batch=getattr(loader, "batch_size", None),
        drop=bool(getattr(loader, "drop_last", False)),
        workers=getattr(loader, "num_workers", 0),
        size=None if skips else _size(getattr(loader, "dataset", None)),
        length=_size(loader),
        data=observers.number_of_data(recorder, getattr(loader, "dataset", None)),
        flags=observers.changed_flags(recorder, getattr(loader, "dataset", None)),
        split=observers.split_of(getattr(loader, "dataset", None)),
        rows=getattr(getattr(loader, "dataset", None), "lockstep_rows", None),
        streamed=isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset),
        seed=getattr(inner, "seed", None),
        generators=observers.generator_states(),
        steps=list(recorder.steps),
    )


def _size(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None
