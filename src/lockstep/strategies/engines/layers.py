"""Facts about the layers of transformers models, for engines that shard or hook them.

In: a model, or its config. Out: the blocks to shard together, a plan for tensor parallelism, or a refusal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.config.errors import CodedError
from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.data.job import Job
from lockstep.tasks.models import heads
from lockstep.tasks.models.model_configs import leaves_out_layers, load_config
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from lockstep.tasks.modules import dataset, loss_probe
else:  # for a user's own model
    dataset, loss_probe = lazy("lockstep.tasks.modules", "dataset", "loss_probe")

# Families that call their layers' `forward` directly (Reformer: again in its own backward), bypassing the hooks with
# which FSDP gathers a layer's weights.
_PAST_HOOKS = {"squeezebert", "reformer"}
# Families that run a layer several times in a forward: its gradient is reduced once, with the root module.
_RUN_AGAIN = {"albert", "hrm_text"}


class StandIn(nn.Module):
    """Placeholder for a module that another rank holds."""


def check_layers(job: Job, engine: str) -> None:
    """Refuse a model that skips layers, for an engine whose ranks must all run the same ones, and a user's model with a
    scalar weight. Errors: `RunError`."""
    if job.task.own_model:  # DeepSpeed detects unused weights itself
        check_scalars(job, "strategy.name", engine, "strategy.name=ddp")
        return
    if (entry := leaves_out_layers(load_config(job.run.model))) is not None:
        raise RunError(
            "LS4100",
            f"model.config.{entry}: {engine} needs every rank to run the same layers, and this entry skips "
            "some at random; set it to 0, or use strategy.name=ddp or fsdp2",
        )


def check_scalars(job: Job, key: str, engine: str, instead: str) -> None:
    """Refuse a user's model with a scalar weight. Errors: `RunError`."""
    if not job.task.own_model:
        return
    scalar = next(
        (n for n, p in dataset.model(dataset.OwnCode.of(job.run), empty=True).named_parameters() if not p.dim()), None
    )
    if scalar is not None:
        raise RunError(
            "LS4109",
            f"{key}: {engine} does not support {scalar}, a weight without a dimension; give it the shape [1], or use "
            f"{instead}",
        )


# Families whose layers read a submodule's weight without calling the submodule, or before calling it, according to
# `benchmarks/families.py --ways zero3:2 --recompute`, which tries all families.
READS_WITHIN = (
    *("falcon_h1", "hunyuan_v1_moe", "inkling_text", "jamba", "longt5", "nllb-moe", "qwen3_next", "seamless_m4t_v2"),
    *("switch_transformers", "t5"),
)
# Heads and families that do so even without recomputed activations.
NEVER_IN_TIME = {("causal", "mamba2"), ("masked", "mobilebert"), ("masked", "neomme")}
# The backbone's head is called, but gets no gradient; `vision_use_head: false` removes it.
CALLED_IN_VAIN = ("image_classification", "siglip")


def not_in_time(recomputes: bool) -> RunError:
    """Return the error for a model that ZeRO-3 cannot compute. `recomputes`: recomputed activations may be the
    cause."""
    instead = "remove model.checkpoint_activations, or " * recomputes
    return RunError(
        "LS4107",
        "strategy.name: DeepSpeed's ZeRO-3 cannot gather this model's weights in time, because they are used in "
        "another order than it recorded, or without a call of the module that holds them; "
        f"{instead}use strategy.name=fsdp2 or zero2",
    )


class OtherWeights(CodedError):
    """This rank would gather other weights than the other ranks, which did not detect it."""


def other_weights(name: str) -> RunError:
    """Return the error for a model whose ranks would gather different weights in ZeRO-3. `name`: a weight that only
    some examples use."""
    return RunError(
        "LS4410",
        "strategy.name: ZeRO-3 gathers the weights of one module after the other, all ranks together, so every "
        f"micro-batch has to use the same weights in the same order; this model uses {name} for some examples and not "
        "for others. Use strategy.name=zero2, ddp or fsdp2",
    )


def check_same_weights(job: Job) -> None:
    """Refuse for ZeRO-3 a user's model that skips weights for some examples. Errors: `RunError`."""
    if not job.task.own_model or job.processes == 1:
        return
    if (name := loss_probe.used_now_and_then(dataset.OwnCode.of(job.run))) is not None:
        raise other_weights(name)


def call_order(model: nn.Module, forward: Callable[[], None]) -> list[str]:
    """Return what a forward makes ZeRO-3 gather, in order: modules with weights that are called, and weights that are
    read outside of their module's forward, such as the entries of a `ParameterList`."""
    order: list[str] = []
    plain = {module: module._parameters for module in model.modules()}
    for module in plain:
        module._parameters = _Parameters(module._parameters)
    undo = _watch(model, order.append)
    try:
        forward()
    finally:
        undo()
        for module, parameters in plain.items():
            parameters.clear()
            parameters |= module._parameters  # a lazy module may have made its weights
            module._parameters = parameters
    return order


def check_read_within(model: nn.Module, order: Sequence[str]) -> None:
    """Refuse a model that reads a weight outside of its module's forward, for DeepSpeed's own autograd graph. `order`:
    of `call_order`. Errors: `RunError`."""
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if (name := next((name for name in order if name in weights), None)) is not None:
        raise RunError(
            "LS4430",
            f"strategy.name: this model reads {name} outside of its module's forward, where DeepSpeed's ZeRO-3 has "
            "freed it before backward; use strategy.name=zero2, ddp or fsdp2, or let lockstep gather it again "
            "(strategy.exact, without options that keep weights in bf16)",
        )


class _Parameters(dict[str, nn.Parameter | None]):
    """A module's parameters, in a dictionary whose class can be replaced, as that of DeepSpeed's can."""


def _watch(model: nn.Module, gathers: Callable[[str], None]) -> Callable[[], None]:
    """Call `gathers` before each module with weights is called, and before each weight is read outside of its module's
    forward, with the name. Returns a function that ends this. The root module's own weights are always there."""
    undo: list[Callable[[], None]] = []
    for name, module in model.named_modules():
        if not name or next(module.parameters(recurse=False), None) is None:
            continue
        depth = [0]  # of the module's own calls that are running

        def enter(*_: Any, name: str = name, depth: list[int] = depth) -> None:
            depth[0] += 1
            gathers(name)

        def leave(*_: Any, depth: list[int] = depth) -> None:
            depth[0] -= 1

        kind: Any = type(module._parameters)

        def read(parameters: Any, key: str, name: str = name, depth: list[int] = depth, kind: Any = kind) -> Any:
            if not depth[0] and dict.get(parameters, key) is not None:
                gathers(f"{name}.{key}")
            return kind.__getitem__(parameters, key)

        module._parameters.__class__ = type(kind.__name__, (kind,), {"__getitem__": read})
        undo += [
            module.register_forward_pre_hook(enter, prepend=True).remove,
            module.register_forward_hook(leave, always_call=True).remove,
            partial(setattr, module._parameters, "__class__", kind),
        ]

    def end() -> None:
        for each in undo:
            each()

    return end


def hold_to(model: nn.Module, order: Sequence[str]) -> None:
    """Make every training forward raise an error before it gathers a weight out of `order` (of `call_order`), which is
    the same on all ranks: ranks that gather different weights at the same time crash, or use each other's weights."""
    position = [-1]  # -1: no forward is running, or activations are recomputed

    def refuse(name: str) -> None:
        error = other_weights(name)
        raise OtherWeights(error.code, error.message)

    def begin(*_: Any) -> None:
        position[0] = 0 if model.training else -1

    def enter(name: str) -> None:
        if position[0] >= 0:
            if position[0] == len(order) or order[position[0]] != name:
                refuse(name)
            position[0] += 1

    def end(*_: Any) -> None:
        if position[0] not in (-1, len(order)):
            refuse(order[position[0]])
        position[0] = -1

    _watch(model, enter)
    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end, prepend=True)


def check_gathered(job: Job) -> None:
    """Refuse for ZeRO-3 a family whose weights are not gathered in time, and recomputed activations if a layer reads
    weights of another module: DeepSpeed gathers those in the first forward, but has freed them in the second, or sees
    another order than it recorded. Errors: `RunError`."""
    run, task = job.run, job.task
    if task.own_model:
        return
    config = load_config(run.model)
    family = config.model_type
    if (task.head, family) in NEVER_IN_TIME:
        raise not_in_time(recomputes=False)
    # an entry since transformers 5.23; before, models read it where it was given, and have the head without it
    if (task.head, family) == CALLED_IN_VAIN and getattr(config.vision_config, "vision_use_head", True):
        raise RunError(
            "LS4108",
            "model.config.vision_config.vision_use_head: DeepSpeed's ZeRO-3 fails where weights are used in forward "
            "alone, as those of this head are; set it to false, or use strategy.name=fsdp2 or zero2",
        )
    if run.model.checkpoint_activations and family in READS_WITHIN:
        raise RunError(
            "LS4105",
            f"model.checkpoint_activations: under ZeRO-3 a {family} cannot recompute its activations, because "
            "its layers read weights of modules within, which DeepSpeed does not gather in time; remove it, or use "
            "strategy.name=fsdp2",
        )


# Families whose forward writes to trained weights, with the config entry that disables it at 0: RWKV divides them by
# powers of two for evaluation; Gemma 3n clamps some in training, which cannot be disabled.
WRITES_WEIGHTS: dict[str, str | None] = {"gemma3n_text": None, "rwkv": "rescale_every"}


def check_writes(job: Job, key: str, engine: str, instead: str) -> None:
    """Refuse a family whose forward writes to its weights, for an engine that replaces weights by shards. Writes of
    other models are detected in their first forward. Errors: `RunError`."""
    config = None if job.task.own_model else load_config(job.run.model)
    if config is None or config.model_type not in WRITES_WEIGHTS:
        return
    entry = WRITES_WEIGHTS[config.model_type]
    if entry is None or getattr(config, entry, None):
        switched_off = f"set model.config.{entry}=0, under which it writes nothing, or " if entry else ""
        raise RunError(
            "LS4106",
            f"{key}: {engine} replaces weights by shards, and would lose what a {config.model_type}'s forward writes "
            f"to them; {switched_off}use {instead}",
        )


def empty_model(section: ModelSection, config: Any, auto: str = "AutoModel") -> Any:
    """Return a transformers model of this config, by one of its Auto classes, on the meta device; None if it cannot be
    built (code from the Hub, inconsistent sizes), which is reported later."""
    import transformers

    try:
        with torch.device("meta"):
            return getattr(transformers, auto).from_config(config, trust_remote_code=section.trust_remote_code)
    except Exception:
        return None


def sharing_embeddings(job: Job) -> list[str]:
    """Return the modules that share weights with the run's input or output embeddings: tied embeddings of encoder and
    decoder, or a head with the bias of its last layer. Empty if the model cannot be built on the meta device, or does
    not name its embeddings."""
    try:
        model = empty_model(job.run.model, load_config(job.run.model), heads.of(job.task.head or "").auto)
        embeddings = [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
    except Exception:
        return []
    weights = {id(p) for module in embeddings for p in module.parameters(recurse=False)}
    others = [(name, module) for name, module in model.named_modules() if all(module is not e for e in embeddings)]
    return [name for name, module in others if any(id(p) in weights for p in module.parameters(recurse=False))]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: the modules that transformers does not split over devices, else the items of its
    outermost lists of equal modules (layers of an encoder or decoder). None is within another, and none has a weight
    that is also used outside of it."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))

    def alone(block: nn.Module) -> bool:
        own = Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False))
        return bool(own) and all(uses[key] == count for key, count in own.items())

    if getattr(getattr(model, "config", None), "model_type", None) in _PAST_HOOKS | _RUN_AGAIN:
        return []
    single = [block for block in _layers(model) if alone(block)]
    inner = {id(below) for block in single for below in block.modules() if below is not block}
    return [block for block in single if id(block) not in inner]


def named_blocks(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return the modules that match the user's names, with `*` for any part of a name. Errors: `RunError` for a name
    without a match, and for nested blocks."""
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        fitting = {name: m for name, m in model.named_modules() if name and fnmatchcase(name, pattern)}
        if not fitting:
            known = ", ".join(name for name, _ in model.named_children())
            raise RunError(
                "LS4101",
                f"strategy.options.blocks: the model has no module {pattern!r}; its top-level modules are {known}",
            )
        chosen |= fitting
    for name in chosen:
        if outer := next((other for other in chosen if name.startswith(f"{other}.")), None):
            raise RunError("LS4102", f"strategy.options.blocks: {name} is inside of {outer}; name only one of them")
    return list(chosen.values())


def _by_size(model: nn.Module, called_once: Sequence[str]) -> list[nn.Module]:
    """Return the blocks of a model of unknown structure: the outermost modules with 1/50 to 1/4 of all weights that
    every forward calls exactly once."""
    total = sum(p.numel() for p in model.parameters())
    names: list[str] = []
    for name, module in model.named_modules():
        size = sum(p.numel() for p in module.parameters())
        inner = any(name.startswith(f"{block}.") for block in names)
        if name in called_once and not inner and total / 50 <= size <= total / 4:
            names.append(name)
    return [model.get_submodule(name) for name in names]


def _layers(model: nn.Module) -> list[nn.Module]:
    if (called_once := getattr(model, "lockstep_called_once", None)) is not None:
        return _by_size(model, called_once)
    class_names = set(getattr(model, "_no_split_modules", None) or ())
    modules = [m for m in model.modules() if type(m).__name__ in class_names]
    if modules:
        return modules
    lists = {id(m): _of_stage(m) for m in model.modules() if isinstance(m, nn.ModuleList)}
    lists = {key: items for key, items in lists.items() if len({type(item) for item in items}) == 1}
    # not Funnel's blocks of layers
    lists = {key: items for key, items in lists.items() if not isinstance(items[0], nn.ModuleList)}
    inner = {id(below) for items in lists.values() for item in items for below in item.modules()}
    return [item for key, items in lists.items() if key not in inner for item in items]


def _of_stage(modules: nn.ModuleList) -> list[nn.Module]:
    """Return the modules of a list that exist on this rank (one of several stages)."""
    return [module for module in modules if not isinstance(module, StandIn)]


def tensor_plan(section: ModelSection, ranks: int, prefix: str = "") -> dict[str, Any]:
    """Return transformers' tensor-parallel plan for the model's family, in torch's classes; `prefix`: path of the base
    model.

    Errors: `RunError` if there is no plan, or the number of attention heads is not divisible by `ranks`.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    config = load_config(section)
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan or set(plan.values()) - set(styles):
        raise RunError(
            "LS4103",
            f"strategy.options.tensor_parallel: transformers has no plan for {config.model_type} that can be "
            "used here (llama, qwen2, mistral and their like have one); remove the option",
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (getattr(config, name, None) or ranks) % ranks:
            raise RunError(
                "LS4104",
                f"strategy.options.tensor_parallel: {ranks} ranks do not divide the model's "
                f"{getattr(config, name)} {name}; choose a number that does",
            )
    return {f"{prefix}{pattern}": styles[style]() for pattern, style in plan.items()}


def call_on_cpu(model: nn.Module, task: Task) -> None:
    """Run forward on the first two examples on the CPU, before the model is sharded."""
    model(**task.first_inputs(torch.device("cpu")))
