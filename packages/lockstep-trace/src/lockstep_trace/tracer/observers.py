"""Further wrappers of the tracer: collectives, autocast's cache, late parameters, loaded states, random splits; and the
random number generators of data loader workers, which may draw the same numbers.

In: `Hooks`; a data loader whose pass begins. Out: calls of its recorder; one record per forked worker at its end, with
hashes of the states of all generators.
"""

from __future__ import annotations

import collections
import functools
import multiprocessing
import pickle
import random
import re
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from . import lifetimes, modes
from .evidence import ARGUMENTS
from .gradient_history import written
from .graph import LAYERS, VIEWS, name_of
from .inputs import hash_of, tensors_of, wrapped
from .lifetimes import is_dropped

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "send",
    "recv",
    "isend",
    "irecv",
)
DEPTH = 3  # nesting depth of data sets
LOOKS = 8  # first losses
OF_TRAINING = re.compile(r"train|aug|transform|eval|test|rand|noise|flip|jitter|mask|crop")  # settings of a part
TENSORS = 64  # of the last collectives
RELEASED_S = 1.0  # a tensor that the script has meanwhile used elsewhere is never released


class Releases:
    """The tensors of the last collectives, each with the number of its owners before the call.

    A thread of gloo takes Python's lock to release a tensor (torch 2.10 and later). A DistributedDataParallel model
    that is freed after its group is destroyed joins the threads while it holds that lock: if one is late, the process
    hangs, traced or not."""

    def __init__(self) -> None:
        self.last: collections.deque[tuple[weakref.ref[Tensor], int]] = collections.deque(maxlen=TENSORS)

    def called(self, value: Any) -> None:
        """Note the tensors on the CPU in the arguments of a collective."""
        if type(value) in (Tensor, nn.Parameter):
            if value.device.type == "cpu" and hasattr(value, "_use_count"):  # torch 2.4 may lack it
                self.last.append((weakref.ref(value), value._use_count()))
        elif isinstance(value, list | tuple):
            for each in value[-TENSORS:]:
                self.called(each)

    def wait(self) -> None:
        """Return when each tensor has no more owners than before its collective, or after `RELEASED_S`."""
        until = time.monotonic() + RELEASED_S
        while self.last and time.monotonic() < until:
            ref, count = self.last[0]
            tensor: Any = ref()
            if tensor is None or tensor._use_count() <= count:
                self.last.popleft()
            else:
                time.sleep(0.001)
        self.last.clear()


def install(hooks: Any) -> None:
    _wrap_collectives(hooks)
    _wrap_cache(hooks)
    _wrap_optimizers(hooks)
    _wrap_split()
    _wrap_replicas(hooks)
    _wrap_loads(hooks)
    _wrap_checkpoint(hooks)
    _wrap_saved(hooks)
    _wrap_losses(hooks)
    modules: dict[str, Any] = {"random": random, "numpy": getattr(sys.modules.get("numpy"), "random", None)}
    for name, module in modules.items():
        if module is not None:
            module.seed = _Seed(hooks, name, module)
    lifetimes.install(hooks)
    modes.install(hooks)
    _wrap_reading(hooks)
    register_module_parameter_registration_hook(functools.partial(_registered, hooks))


class _Seed:
    """Stands for a module's function `seed`, also where that is pickled."""

    def __init__(self, hooks: Any, name: str, module: Any) -> None:
        functools.update_wrapper(self, module.seed)
        self.__module__ = module.__name__
        self._hooks, self._name, self._seed = hooks, name, module.seed

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._seed(*args, **kwargs)
        if self._hooks.recorder is not None and any(self._hooks.recorder.steps):
            self._hooks.guarded(self._hooks.recorder.seeded, self._name, next(iter((*args, *kwargs.values())), None))

    def __reduce__(self) -> str:
        return "seed"


def _wrap_collectives(hooks: Any) -> None:
    if not torch.distributed.is_available():
        return
    for name in COLLECTIVES:
        original = getattr(torch.distributed, name, None)
        if original is not None:
            wrapped = _counting(hooks, name, original)
            for module in (torch.distributed, torch.distributed.distributed_c10d):
                if getattr(module, name, None) is original:
                    setattr(module, name, wrapped)
    destroy = torch.distributed.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        hooks.guarded(hooks.releases.wait)
        destroy(*args, **kwargs)

    places: tuple[Any, ...] = (torch.distributed, torch.distributed.distributed_c10d)
    for place in places:
        place.destroy_process_group = destroy_process_group


def _counting(hooks: Any, name: str, original: Any) -> Any:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if hooks.replaying:
            raise RuntimeError(f"torch.distributed.{name}: not called while a step is recomputed on one rank")
        if not torch.compiler.is_compiling() and hooks.recorder is not None:
            first = args[0] if args else kwargs.get("tensor")
            hooks.guarded(hooks.recorder.collective, name, _elements((args, list(kwargs.values()))), first)
            hooks.guarded(hooks.releases.called, (args, list(kwargs.values())))
        result = original(*args, **kwargs)
        if name == "all_reduce" and result is None and hooks.recorder is not None and not torch.compiler.is_compiling():
            hooks.guarded(_summed, hooks.recorder, *(*args, None, None, None)[:3], kwargs)
        return result

    return collective


def _summed(recorder: Any, tensor: Any, op: Any, group: Any, named: Mapping[str, Any]) -> None:
    since, op, group = recorder.since, named.get("op", op), named.get("group", group)
    tensor, summed = named.get("tensor", tensor), op is None or op == torch.distributed.ReduceOp.SUM
    if group is not None and group.size() != torch.distributed.get_world_size():
        return  # one axis of a mesh: what it sums may be parts of one gradient, or nothing
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.numel() > 1
    if plain and summed and since.backwards and max(recorder.steps, default=0) < LOOKS and len(since.summed) < 4:
        since.summed[tensor.data_ptr()] = tensor.detach().clone()


def undivided_sums(since: Any, optimizer: Any, parameters: Any) -> list[tuple[str, str]]:
    """Return a note if gradients are still sums over ranks, of losses that are means. Adam would divide them itself."""
    rows = [(p.grad, since.summed.get(p.grad.data_ptr())) for p in parameters if p.grad is not None and since.summed]
    same = [g.shape == value.shape and torch.equal(g, value) for g, value in rows if value is not None]
    world = torch.distributed.get_world_size() if same else 1
    plain = isinstance(optimizer, torch.optim.SGD) and since.means == since.backwards
    return [("summed over ranks", str(world))] if plain and world > 1 and all(same) else []


def _elements(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, list | tuple) and value:
        if all(isinstance(v, Tensor) for v in value):
            return sum(v.numel() for v in value)
        return max(_elements(v) for v in value)
    return 0


def _wrap_cache(hooks: Any) -> None:
    original = torch.clear_autocast_cache

    @functools.wraps(original)
    def clear() -> None:
        original()
        if not torch.compiler.is_compiling() and hooks.recorder is not None:
            hooks.recorder.cleared += 1

    torch.clear_autocast_cache = clear


def _wrap_optimizers(hooks: Any) -> None:
    kind = torch.optim.Optimizer
    init, load = kind.__init__, kind.load_state_dict

    @functools.wraps(init)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if hooks.recorder is not None:
            hooks.recorder.optimizers_made += 1
            hooks.recorder.optimizer_refs = [ref for ref in hooks.recorder.optimizer_refs if ref() is not None]
            hooks.recorder.optimizer_refs.append(weakref.ref(self))
            rates = [group.get("lr") for group in self.param_groups]
            if all(isinstance(rate, int | float) for rate in rates):
                hooks.recorder.rates_made[id(self)] = weakref.ref(self), [float(rate) for rate in rates]

    @functools.wraps(load)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        if hooks.recorder is not None:
            hooks.guarded(hooks.recorder.schedules.loads, self)
            hooks.guarded(hooks.recorder.resumes.loads, self)
        return result

    take = kind.state_dict

    @functools.wraps(take)
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hooks.recorder is not None and not torch.compiler.is_compiling():
            hooks.guarded(hooks.recorder.saves_state, self)
        return take(self, *args, **kwargs)

    kind.__init__, kind.load_state_dict = begin, load_state_dict  # type: ignore[method-assign]
    kind.state_dict = state_dict  # type: ignore[method-assign]
    for holder in (kind, nn.Module):
        _wrap_zero(hooks, holder)


def _wrap_reading(hooks: Any) -> None:
    original = torch.load

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if hooks.recorder is not None:
            hooks.guarded(hooks.recorder.resumes.reads, result)
            hooks.guarded(hooks.recorder.loaded.reads, result)
        return result

    torch.load = load


def _wrap_zero(hooks: Any, holder: Any) -> None:
    original = holder.zero_grad

    @functools.wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and hooks.recorder is not None:
            hooks.recorder.use.zeroed = True
        return original(self, *args, **kwargs)

    holder.zero_grad = zero_grad


def _registered(hooks: Any, module: nn.Module, name: str, parameter: Any) -> None:
    recorder = hooks.recorder
    if recorder is None or parameter is None:
        return
    if hooks.inside() and torch.is_grad_enabled():
        recorder.born.add(module, parameter)
    if not recorder.optimizers_made:
        return
    if getattr(module, name, None) is not parameter:
        recorder.late[id(parameter)] = weakref.ref(parameter)


def _wrap_replicas(hooks: Any) -> None:
    kind = torch.nn.parallel.DistributedDataParallel
    init = kind.__init__

    @functools.wraps(init)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if hooks.recorder is not None:
            hooks.recorder.wrappers.append(weakref.ref(self))

    kind.__init__ = begin  # type: ignore[method-assign]


def _wrap_loads(hooks: Any) -> None:
    load = nn.Module.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        if recorder is not None and any(recorder.steps):
            hooks.guarded(_loads, recorder, self, state_dict)
            recorder.since.loaded = "after" if recorder.since.evaluated else "before"
        result = load(self, state_dict, *args, **kwargs)
        if recorder is not None:
            recorder.resumes.model_loads += 1
            if isinstance(state_dict, Mapping) and not torch.compiler.is_compiling():
                absent = [n for n, _ in self.named_parameters() if n not in state_dict]
                hooks.guarded(recorder.loaded.loaded, self, absent)
        if recorder is not None and getattr(result, "unexpected_keys", None):
            hooks.guarded(_loaded, recorder, self, state_dict, result, sys._getframe(1))
        return result

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _loaded(recorder: Any, module: nn.Module, state: Any, result: Any, caller: Any) -> None:
    recorder.state_loads.loaded(module, state, result, is_dropped(caller))


def _loads(recorder: Any, module: nn.Module, state: Any) -> None:
    own = [(p, state[n]) for n, p in module.named_parameters() if isinstance(state.get(n), Tensor)]
    plain = [(p, t) for p, t in own if type(p) is nn.Parameter and p.numel() and t.layout == torch.strided]
    if not all(p.data_ptr() == t.data_ptr() and p.shape == t.shape for p, t in plain):
        return
    versions = (
        recorder.versions()
    )  # torch.distributed.checkpoint writes into a model's own state_dict, which is then loaded
    known = [(p, versions[id(p)]) for p, _ in plain if id(p) in versions]
    unchanged = all(written(p) == version for p, version in known)
    evaluated = [(p, recorder.since.evaluated_at.get(id(p))) for p, _ in known]
    instead = not unchanged and all(written(p) == version for p, version in evaluated)
    if known and (unchanged or instead):
        about = {"model": type(module).__name__, "count": len(plain), "instead": instead}
        recorder.write("self load", **about, steps=list(recorder.steps))


def _wrap_saved(hooks: Any) -> None:
    kind: Any = torch.autograd.graph.saved_tensors_hooks
    enter = kind.__enter__

    @functools.wraps(enter)
    def begin(self: Any) -> Any:
        if not torch.compiler.is_compiling() and hooks.recorder is not None:
            hooks.recorder.saved_hooks = True
        return enter(self)

    kind.__enter__ = begin


def _wrap_checkpoint(hooks: Any) -> None:
    module: Any = torch.utils.checkpoint
    original = getattr(module, "check_backward_validity", None)
    if original is None:
        return

    @functools.wraps(original)
    def check(inputs: Any) -> Any:
        inputs = list(inputs)
        if (
            hooks.recorder is not None and hooks.recorder.with_gradients
        ):  # gradients are off inside the checkpoint itself
            hooks.recorder.since.cut |= not any(isinstance(i, Tensor) and i.requires_grad for i in inputs)
        return original(inputs)

    module.check_backward_validity = check


def _wrap_losses(hooks: Any) -> None:
    for name, look in ARGUMENTS.items():
        setattr(nn.functional, name, _looked_at(hooks, look, getattr(nn.functional, name)))


def _looked_at(hooks: Any, look: Any, original: Any) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        if not torch.compiler.is_compiling() and recorder is not None and torch.is_grad_enabled():
            if look is ARGUMENTS["kl_div"]:
                hooks.guarded(_divergence, recorder, args[0] if args else kwargs.get("input"))
            if recorder.loss_looks < LOOKS:
                hooks.guarded(_note, recorder, look, args, kwargs)
        return original(*args, **kwargs)

    return function


def _note(recorder: Any, look: Any, args: Any, kwargs: Any) -> None:
    if not any(wrapped(t) for _, t in tensors_of([args, kwargs])):
        for note, holds in look(*args, **kwargs):
            recorder.since.observed += [note] if holds is None else []
            recorder.since.noted += [] if holds is None else [(note, holds)]


def _divergence(recorder: Any, value: Any) -> None:
    node = getattr(value, "grad_fn", None)
    while node is not None and name_of(node) in VIEWS:
        node = next((n for n, _ in node.next_functions), None)
    kinds = {"Softmax": "kl_div of probabilities"} | dict.fromkeys(LAYERS, "kl_div of logits")
    if node is not None and name_of(node) in kinds:
        recorder.since.observed.append((kinds[name_of(node)], ""))


# -- data sets -------------------------------------------------------------------------------------------------------


def _wrap_split() -> None:
    kind: Any = torch.utils.data.Subset
    init = kind.__init__
    last: dict[str, Any] = {"number": -1, "part": 0, "base": None, "rows": set()}  # the current split

    @functools.wraps(init)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if _FLAGS.get(id(self.dataset), (None,))[0] is not self.dataset:
            _FLAGS[id(self.dataset)] = self.dataset, _flags(self.dataset)
        frame = sys._getframe(1)
        names = {frame.f_code.co_name, frame.f_back.f_code.co_name if frame.f_back else ""}
        if "random_split" in names:
            rows = set(self.indices)
            if last["base"] != id(self.dataset) or rows & last["rows"]:  # a new split
                last.update(number=last["number"] + 1, part=0, base=id(self.dataset), rows=set())
            self.lockstep_split = [last["number"], last["part"]]
            own = self.dataset.tensors if type(self.dataset) is torch.utils.data.TensorDataset else None
            parts = [t[:: max(1, len(t) // 64)] for t in own or ()]  # rows from all of each tensor
            content = hash(tuple(int(hash_of(part)[0]) for part in parts)) if own else None
            self.lockstep_rows = [hash(tuple(map(int, self.indices))), content]
            last["part"] += 1
            last["rows"] |= rows

    kind.__init__ = begin


_FLAGS: dict[int, tuple[Any, dict[str, Any]]] = {}  # data sets that were split, and their settings then


def _flags(data: Any) -> dict[str, Any]:
    values = {n: v for n, v in getattr(data, "__dict__", {}).items() if OF_TRAINING.search(n)}
    return {n: v for n, v in values.items() if isinstance(v, bool) or (callable(v) and not isinstance(v, nn.Module))}


def changed_flags(recorder: Any, data: Any) -> list[Any] | None:
    """Return [number of the data set that a part was taken from, names and values of its settings that have changed
    since]; None for a data set that is no part."""
    base, before = _FLAGS.get(id(getattr(data, "dataset", None)), (None, {}))
    if base is None or base is not data.dataset:
        return None
    now = {n: v for n, v in _flags(base).items() if n in before and v is not before[n]}
    return [number_of_data(recorder, base), {n: v if isinstance(v, bool) else id(v) for n, v in now.items()}]


def split_of(data: Any, depth: int = DEPTH) -> list[int] | None:
    """Return [split number, part number] if a data set is, or wraps, a part of a random split, else None."""
    values = getattr(data, "__dict__", None)
    if not isinstance(values, dict):
        return None
    if "lockstep_split" in values:
        return list(values["lockstep_split"])
    inner = [v for v in values.values() if isinstance(v, torch.utils.data.Dataset)] if depth else []
    return next((s for v in inner if (s := split_of(v, depth - 1)) is not None), None)


def number_of_data(recorder: Any, data: Any) -> int:
    """Return the number of a data set, one per object."""
    for i, (key, ref) in enumerate(recorder.datasets):
        if key == id(data) and (ref is None or ref() is data):
            return i
    try:
        ref = weakref.ref(data)
    except TypeError:  # a list
        ref = None
    recorder.datasets.append((id(data), ref))
    return len(recorder.datasets) - 1


def weights_of(sampler: Any) -> list[int] | None:
    """Return the number of weights of a WeightedRandomSampler and its number of draws; None for other samplers."""
    if type(sampler) is not torch.utils.data.WeightedRandomSampler:
        return None
    return [len(sampler.weights), int(sampler.num_samples)]


# -- workers of data loaders -------------------------------------------------------------------------------------------


LOOKED_AT = 300  # max. objects of a data set to search


def watched(loader: Any, write: Callable[..., None], name: str) -> Any:
    """Return the `worker_init_fn` that records a loader's workers in a new pass, or None if that is not possible."""
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else multiprocessing.get_start_method()
    if loader.num_workers < 2 or method != "fork" or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return None  # workers may shuffle a stream alike on purpose, to take a share each
    return functools.partial(_begin, loader.worker_init_fn, write, name)


def _begin(init: Any, write: Callable[..., None], loader: str, number: int) -> None:
    if init is not None:
        init(number)
    info = torch.utils.data.get_worker_info()
    if info is None:
        return
    try:
        before = generator_states(info.dataset)
        first: dict[str, str] = {}
        _after_first(info.dataset, first)
        Finalize(None, _end, (write, loader, number, info.dataset, before, first), exitpriority=100)
    except Exception as error:
        write("error", text=f"{type(error).__name__}: {error}", stack="")


def _after_first(data: Any, first: dict[str, str]) -> None:
    kind: Any = type(data)
    name = "__getitems__" if hasattr(kind, "__getitems__") else "__getitem__"
    original = getattr(kind, name)

    @functools.wraps(original)
    def get(self: Any, index: Any) -> Any:
        value = original(self, index)
        if self is data and not first:
            first.update(generator_states(data))
        return value

    setattr(kind, name, get)


def _end(
    write: Callable[..., None], loader: str, number: int, data: Any, before: dict[str, str], first: dict[str, str]
) -> None:
    after = generator_states(data)
    rows = {name: [state, after[name]] for name, state in before.items() if name in after}
    write("worker", loader=loader, number=number, generators=rows, first=first)


def generator_states(data: Any = None) -> dict[str, str]:
    """Return name -> hash of generator states: `torch`, `numpy`, `random`, and `dataset.PATH` for a data set's own."""
    digests = {"torch": _hash(bytes(torch.random.get_rng_state().tolist())), "random": _hash(random.getstate())}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        digests["numpy"] = _hash(numpy.random.get_state())
    visited: set[int] = set()
    waiting = [("dataset", data, 0)]
    while waiting and len(visited) < LOOKED_AT:
        path, value, depth = waiting.pop(0)
        if id(value) in visited:
            continue
        visited.add(id(value))
        state = _state(value, numpy)
        if state is not None:
            digests[path] = _hash(state)
        elif depth < 4:
            waiting += [(f"{path}.{key}", inner, depth + 1) for key, inner in _inside(value)]
    return digests


def _inside(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple) and len(value) <= 16:
        return [(str(i), inner) for i, inner in enumerate(value)]
    attributes = getattr(value, "__dict__", None)
    return list(attributes.items()) if isinstance(attributes, dict) and not isinstance(value, type) else []


def _state(value: Any, numpy: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist() if value.device.type == "cpu" else None
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state()
    return None


def _hash(state: Any) -> str:
    return f"{zlib.crc32(pickle.dumps(state)):08x}"
