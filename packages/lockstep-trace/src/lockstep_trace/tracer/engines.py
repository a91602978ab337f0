"""Engines, evaluators and loads of other libraries: their wrappers, installed when their modules are imported, and the
parts of parameters in the flat tensors of FSDP1 and DeepSpeed.

In: an optimizer's parameters and the called models; an engine at its step. Out: `FlatPart`s with their blocks of the
full parameters; of an engine, records like those of one optimizer. No public API describes a rank's shard, or works
without communication: this reads `_handle` and `_shard_param_infos` of FSDP1, and `_hp_mapping` of DeepSpeed's stages 1
and 2; stage 3 has `safe_get_local_*`.  Also records scores of Trainer and evaluate, and the metric by which Lightning
chooses weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import numbers
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from .fingerprint import Block
from .placement import FlatPart, plain_name


class EngineOptimizer:
    """Stands for the engine's optimizer in the recorder."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.kind = type(engine.optimizer).__name__
        self.state: dict[Any, Any] = {}
        self.param_groups: list[dict[str, Any]] = []
        self._parts: dict[int, FlatPart] = {}

    def refresh(self, gradients: bool) -> None:
        """Read the current parts of this rank."""
        groups: dict[int, list[FlatPart]] = {}
        for parameter in self.engine.module.parameters():
            gradient_part = _part(parameter, gradients)
            if gradient_part is None:
                continue
            number, part = gradient_part
            known = self._parts.setdefault(id(parameter), part)
            known.tensor, known.grad = part.tensor, part.grad
            groups.setdefault(number, []).append(known)
        options = self.engine.optimizer.param_groups
        self.param_groups = [
            {k: v for k, v in options[min(n, len(options) - 1)].items() if k != "params"} | {"params": parts}
            for n, parts in sorted(groups.items())
        ]
        scale = float(getattr(self.engine.optimizer, "loss_scale", 1.0) or 1.0)
        for part in (p for parts in groups.values() for p in parts if p.grad is not None and scale != 1.0):
            assert part.grad is not None
            part.grad.tensor = part.grad.tensor.float() / scale


def _part(parameter: Any, gradients: bool) -> tuple[int, FlatPart] | None:
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        start = mapping.lp_fragment_address.start
        shape, tensor = tuple(parameter.shape), mapping.hp_fragment
        block = Block(shape, (start,), (tensor.numel(),))
        grad = mapping.get_lp_grad_fragment(parameter._index_in_param_group) if gradients else None
        part = None if grad is None else FlatPart(parameter, grad.reshape(-1)[: tensor.numel()], block)
        return mapping.param_group_index, FlatPart(parameter, tensor.detach().reshape(-1), block, part)
    if hasattr(parameter, "ds_id") and parameter.ds_tensor is not None:
        return _of_stage_3(parameter, gradients)
    return None


def _of_stage_3(parameter: Any, gradients: bool) -> tuple[int, FlatPart] | None:
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_grad

    tensor = safe_get_local_fp32_param(parameter)
    if tensor is None:
        return None
    import torch.distributed as dist

    rank = dist.get_rank(parameter.ds_process_group) if dist.is_initialized() else 0
    numel, start = parameter.ds_tensor.ds_numel, rank * parameter.ds_tensor.ds_numel
    count = max(min(numel, parameter.ds_numel - start), 0)  # the last parts are padded
    block = Block(tuple(parameter.ds_shape), (min(start, parameter.ds_numel),), (count,))
    grad = safe_get_local_grad(parameter) if gradients else None
    part = None if grad is None else FlatPart(parameter, _flat(grad)[:count], block)
    return 0, FlatPart(parameter, _flat(tensor)[:count], block, part)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def install_deepspeed(hooks: Any) -> None:
    """Wrap the engine's step, after deepspeed is imported."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine.step
    optimizers: dict[int, EngineOptimizer] = {}

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        partitioned = any(
            getattr(p, "_hp_mapping", None) is not None or hasattr(p, "ds_id") for p in self.module.parameters()
        )
        if recorder is None or not partitioned or not self.is_gradient_accumulation_boundary():
            return original(self, *args, **kwargs)
        optimizer = optimizers.setdefault(id(self), EngineOptimizer(self))
        hooks.guarded(optimizer.refresh, True)
        limit = self.gradient_clipping()
        if limit:
            recorder.since.clips.append({"how": "clip_grad_norm_", "limit": float(limit), "unseen": True})
        here = hooks.guarded(recorder.before_step, optimizer)
        skipped, hooks.engine_steps = self.skipped_steps, True
        try:
            result = original(self, *args, **kwargs)
        finally:
            hooks.engine_steps = False
        if self.skipped_steps > skipped:
            hooks.guarded(recorder.skipped, optimizer)
        elif here is not None:
            hooks.guarded(optimizer.refresh, False)
            hooks.guarded(_after, recorder, optimizer, here)
        return result

    DeepSpeedEngine.step = step


def _after(recorder: Any, optimizer: EngineOptimizer, here: dict[str, Any]) -> None:
    if "measured" in here:
        here["measured"].locals = [(p.tensor, p.block, "") for p, _ in here["parameters"]]
    recorder.after_step(optimizer, here)


# -- FSDP1 -------------------------------------------------------------------------------------------------------------


MODULE = "torch.distributed.fsdp"


def wrapper() -> Any:
    """Return `FullyShardedDataParallel` if the script has imported it, else None."""
    return getattr(sys.modules.get(MODULE), "FullyShardedDataParallel", None)


def expanded(parameters: Iterable[Any], roots: Iterable[nn.Module]) -> list[list[Any]]:
    """Return for each parameter [itself], or the `FlatPart`s of a rank's shard. A part of length 0 is a parameter that
    the rank does not hold."""
    known = dict(_known(roots)) if wrapper() is not None else {}
    return [known.get(id(p)) or [p] for p in parameters]


def _known(roots: Iterable[nn.Module]) -> Iterator[tuple[int, list[FlatPart]]]:
    for root in roots:
        for name, module in root.named_modules():
            handle = getattr(module, "_handle", None) if isinstance(module, wrapper()) else None
            if handle is None or not handle.uses_sharded_strategy:
                continue  # unsharded: its parameters are views of full tensors
            flat, prefix = handle.flat_param, plain_name(name) if name else ""
            infos = list(zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True))
            names = [plain_name(f"{prefix}.{fqn}" if prefix else fqn) for fqn, *_ in infos]
            if flat._params is None:
                pairs = zip(names, infos, strict=True)
                yield id(flat), [_part_of_shard(flat, n, shape, info, True) for n, (_, shape, info) in pairs]
                continue
            for n, parameter, (_, shape, info) in zip(names, flat._params, infos, strict=True):
                yield id(parameter), [_part_of_shard(parameter, n, shape, info, False)]


def _part_of_shard(source: Any, name: str, shape: Any, info: Any, flat: bool) -> FlatPart:
    size = info.numel_in_shard if info.in_shard else 0
    start = info.intra_param_start_idx if info.in_shard else 0
    block = Block(tuple(shape), (start,), (size,))
    first = info.offset_in_shard if flat and info.in_shard else 0

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1)[first : first + size]

    grad = None if source.grad is None else FlatPart(source, own(source.grad), block)
    return FlatPart(source, own(source), block, grad, name)


def install_fsdp1(hooks: Any) -> None:
    """Wrap `FullyShardedDataParallel.clip_grad_norm_`, which clips by the norm over all ranks."""
    kind = wrapper()
    if kind is None or hasattr(kind.clip_grad_norm_, "lockstep"):
        return
    original = kind.clip_grad_norm_

    @functools.wraps(original)
    def clip(self: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        if recorder is None:
            return original(self, max_norm, *args, **kwargs)
        hooks.guarded(recorder.clipping, list(self.parameters()), "clip_grad_norm_", max_norm)
        with hooks.clipping():
            return original(self, max_norm, *args, **kwargs)

    clip.lockstep = True  # type: ignore[attr-defined]
    kind.clip_grad_norm_ = clip


# -- imports -----------------------------------------------------------------------------------------------------------


ENGINE = "deepspeed"


class Finder:
    """Import finder that calls `then` with a module after it is imported."""

    def __init__(self, then: Callable[[ModuleType], None], module: str) -> None:
        self.then, self.module = then, module

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # find_spec may only check for the module, without importing it
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            load(module)
            self.then(module)

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


class Beginning(ModuleSpec):
    """The spec of a module whose own import has imported torch, and so began the trace: calls `then` at its end."""

    then: Callable[[], None]

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_initializing"))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            then = self.__dict__.pop("then")
            if self.name in sys.modules:  # its import did not fail
                then()


def install(hooks: Any, module: str) -> None:
    """Wrap a module's functions, also between two traces of a process."""

    works: list[Callable[[], None]] = [functools.partial(install_evaluator, hooks, module)]
    if module in (ENGINE, LOADS):
        works = [functools.partial(install_deepspeed if module == ENGINE else _install_loads, hooks)]
    if module == "transformers.trainer":
        works.append(functools.partial(_install_columns, hooks))
    for work in works:
        if hooks.recorder is not None:
            hooks.guarded(work)
        else:
            with contextlib.suppress(Exception):
                work()


def watch(hooks: Any) -> None:
    """Install the wrappers of each module now, or when it is imported."""
    for name in (ENGINE, LOADS, *EVALUATORS, *SELECTORS):
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if type(spec) is ModuleSpec and getattr(spec, "_initializing", False):
            spec.__class__ = Beginning
            spec.__dict__["then"] = functools.partial(install, hooks, name)
        elif module is not None:
            install(hooks, name)
        else:
            sys.meta_path.insert(0, Finder(lambda module: install(hooks, module.__name__), name))


LOADS = "transformers.modeling_utils"
EVALUATORS = {"transformers.trainer": ("Trainer", "evaluate"), "evaluate.module": ("EvaluationModule", "compute")}
LIGHTNING = {
    "model_checkpoint": ("ModelCheckpoint", "check_monitor_top_k"),
    "early_stopping": ("EarlyStopping", "_evaluate_stopping_criteria"),
}
SELECTORS = {
    f"{package}.callbacks.{module}": method
    for package in ("lightning.pytorch", "pytorch_lightning")
    for module, method in LIGHTNING.items()
}
TIMES = ("runtime", "per_second", "compilation_time", "epoch")  # parts of names that are not scores


def install_evaluator(hooks: Any, module: str) -> None:
    """Wrap the evaluator, or the code that selects by a score, after its module is imported."""
    if module in SELECTORS:
        _install_selector(hooks, getattr(sys.modules[module], SELECTORS[module][0]), SELECTORS[module][1])
        return
    name, method = EVALUATORS[module]
    kind = getattr(sys.modules[module], name)
    original = getattr(kind, method)

    @functools.wraps(original)
    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The library evaluate copies this function's code, and adds to the docstring that is in it."""
        scores = original(self, *args, **kwargs)
        if hooks.recorder is not None and isinstance(scores, Mapping):
            hooks.guarded(_write, hooks.recorder, f"{name}.{method}", scores)
            hooks.guarded(_selects, hooks.recorder, getattr(self, "args", None), scores)
        return scores

    setattr(kind, method, evaluate)


def _write(recorder: Any, by: str, scores: Mapping[str, Any]) -> None:
    named = {str(name): value for name, value in scores.items() if isinstance(value, numbers.Real)}
    values = {name: float(value) for name, value in named.items() if not any(part in name for part in TIMES)}
    if values:
        recorder.end_evaluation()
        recorder.write("scores", by=by, scores=values, steps=list(recorder.steps))


def _selects(recorder: Any, options: Any, scores: Mapping[str, Any]) -> None:
    metric = getattr(options, "metric_for_best_model", None)
    if getattr(options, "load_best_model_at_end", False) and isinstance(metric, str):
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        if isinstance(scores.get(name), numbers.Real):
            mode = "max" if options.greater_is_better else "min"
            recorder.write("selection", by="Trainer", metric=metric, mode=mode, value=float(scores[name]))


def _install_selector(hooks: Any, kind: Any, method: str) -> None:
    original = getattr(kind, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def select(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor | float)), None)
        recorder = hooks.recorder
        if recorder is not None and value is not None:
            about = {"by": kind.__name__, "metric": str(self.monitor), "mode": str(self.mode)}
            hooks.guarded(lambda: recorder.write("selection", **about, value=float(value)))
        return original(self, *args, **kwargs)

    setattr(kind, method, select)


def _install_loads(hooks: Any) -> None:
    """Wrap `from_pretrained`, whose call and result stay as they are, and its inner function, whose result says which
    weights a checkpoint lacks: an object in transformers 5, a tuple before. Another result is not recorded."""
    kind = sys.modules[LOADS].PreTrainedModel
    original, loads = kind.from_pretrained.__func__, vars(kind).get("_load_pretrained_model")
    if not isinstance(loads, classmethod | staticmethod):
        return
    inner, results = loads.__func__, dict[int, Any]()

    @functools.wraps(inner)
    def load(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        model = next((a for a in (*args, *kwargs.values()) if isinstance(a, nn.Module)), None)
        if hooks.recorder is not None and model is not None:
            results[id(model)] = result
        return result

    @functools.wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(cls, *args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        absent = hooks.guarded(_absent, results.pop(id(model), ()))
        if hooks.recorder is not None and absent is not None:
            hooks.guarded(hooks.recorder.loaded.loaded, model, absent)
        return result

    kind._load_pretrained_model = type(loads)(load)
    kind.from_pretrained = classmethod(from_pretrained)


def _absent(result: Any) -> set[str] | None:
    """Return the names that a checkpoint lacks, or has in another shape."""
    rows = result if isinstance(result, tuple) else ()
    about = next((each for each in rows if hasattr(each, "missing_keys")), None)
    if about is not None:
        missing, other = about.missing_keys, getattr(about, "mismatched_keys", None) or ()
    elif len(rows) > 3 and isinstance(rows[0], nn.Module):
        missing, other = rows[1], rows[3]
    else:
        return None
    return {*missing, *(each if isinstance(each, str) else each[0] for each in other)}


def _install_columns(hooks: Any) -> None:
    kind = sys.modules["transformers.trainer"].Trainer
    original = getattr(kind, "_remove_unused_columns", None)
    if original is None:
        return

    @functools.wraps(original)
    def remove(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, dataset, *args, **kwargs)
        if hooks.recorder is not None:
            hooks.guarded(_removed, hooks.recorder, self, dataset, result)
        return result

    kind._remove_unused_columns = remove


def _removed(recorder: Any, trainer: Any, before: Any, after: Any) -> None:
    gone = set(getattr(before, "column_names", ())) - set(getattr(after, "column_names", ()))
    collator = trainer.data_collator
    own = [type(trainer).compute_loss, collator if hasattr(collator, "__code__") else type(collator).__call__]
    named = {name for function in own for name in _constants(getattr(function, "__code__", None))}
    if names := sorted(gone & named):
        recorder.write("fact", fact="column removed", argument=", ".join(names))


def _constants(code: Any) -> set[str]:
    if code is None or "site-packages" in code.co_filename:
        return set()
    inner = (name for each in code.co_consts if hasattr(each, "co_consts") for name in _constants(each))
    return {each for each in code.co_consts if isinstance(each, str)} | set(inner)


COMPILER = "torch._dynamo.eval_frame"
CONTEXTS = ("_TorchDynamoContext", "OptimizeContext")


def watch_compiler(around: Callable[..., Any]) -> None:
    """Wrap everything that `torch.compile` compiles from now on: it becomes one entry of `around`, since it would fall
    back to eager mode under a dispatch mode. `call_site` sees those compiled before."""
    if COMPILER in sys.modules:
        _wrap(sys.modules[COMPILER], around)
    else:
        sys.meta_path.insert(0, Finder(lambda module: _wrap(module, around), COMPILER))


def _wrap(module: Any, around: Callable[..., Any]) -> None:
    for name in CONTEXTS:
        kind = getattr(module, name, None)
        if kind is not None and "__call__" in vars(kind):
            kind.__call__ = _outside(kind.__call__, getattr(module, "DisableContext", ()), around)


def _outside(original: Any, disabling: Any, around: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(self: Any, function: Any) -> Any:
        result = original(self, function)
        if isinstance(self, disabling) or not isinstance(result, types.FunctionType):
            return result  # called from a module's own forward

        @functools.wraps(result)  # with the attributes by which dynamo finds the function inside
        def compiled(*args: Any, **kwargs: Any) -> Any:
            return around(result, args, kwargs)

        return compiled

    return call
