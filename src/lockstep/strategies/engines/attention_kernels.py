"""Find which attention kernels a step runs, by the names under which torch's dispatcher calls them.

In: a step to watch. Out: a refusal if a kernel ran whose gradient may differ in bits from call to call. Libraries
choose kernels by device, shapes and version: torch's nightlies prefer cuDNN, whose backward torch does not hold
deterministic even under `torch.use_deterministic_algorithms` (pytorch#187770). Operations that a compiled micro-batch
calls are checked in its code instead (`region.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn

from lockstep.config.run import RunError
from lockstep.distributed.step_timer import quiet_profiler

DEVICES = ("cuda",)  # on CPUs, torch has no kernel of attention that varies
VARYING = "(deterministic=False)"  # after the name of a kernel that was called without its option
ATTENTION = re.compile(rf"\w+::\w*(attention|attn)\w*({re.escape(VARYING)})?$")

# Under torch's deterministic switch these repeat their bits: torch's flash attention has a deterministic backward, its
# memory-efficient attention computes a row's gradient in one block, and `math` consists of matrix products.
REPEATING = re.compile(
    r"aten::(scaled_dot_product_attention|_scaled_dot_product_attention_math"
    r"|_scaled_dot_product_(flash|efficient)_attention(_for_cpu)?(_backward)?"
    r"|_(flash|efficient)_attention_(forward|backward))$"
    r"|torch_attn::_varlen_attn(_backward)?$|lockstep::attention(_backward)?$"
    r"|flash_attn::_flash_attn_(varlen_)?(forward|backward)$"  # with its option, which `World` sets for transformers
)


FORWARDS = 2  # of the model, that are recorded: an operation takes 2.5 kB of host memory, and a step may run millions


@contextmanager
def recorded(model: nn.Module) -> Iterator[set[str]]:
    """A context that yields a set, to which it adds the names of operations that ran within it, until the model's
    forward begins once more than `FORWARDS` times."""
    from torch.profiler import ProfilerActivity, profile

    quiet_profiler()
    names, forwards = set[str](), count(1)
    watching = profile(activities=[ProfilerActivity.CPU], record_shapes=True)  # and values of arguments

    def counted(module: nn.Module, inputs: Any) -> None:
        if next(forwards) > FORWARDS:
            recording.close()

    hook = model.register_forward_pre_hook(counted)
    try:
        with ExitStack() as recording:
            recording.enter_context(watching)
            yield names
    finally:
        hook.remove()
    results = watching.profiler.kineto_results if watching.profiler is not None else None
    names |= {_called(event) for event in results.events()} if results is not None else set()


def _called(event: Any) -> str:
    """Return the name of a recorded operation, with `VARYING` if it is attention whose `deterministic` was False."""
    name: str = event.name()
    if not ATTENTION.match(name):
        return name
    space, _, operation = name.partition("::")
    overload = getattr(getattr(getattr(torch.ops, space), operation, None), "default", None)
    arguments = [argument.name for argument in overload._schema.arguments] if overload is not None else []
    values = dict(zip(arguments, event.concrete_inputs(), strict=False))
    return f"{name}{VARYING}" if values.get("deterministic") is False else name


def refused(names: Iterable[str]) -> list[str]:
    """Return those attention kernels among operations that are not known to repeat their bits, sorted."""
    return sorted(name for name in {*names} if ATTENTION.match(name) and not REPEATING.match(name))


@contextmanager
def checked(
    model: nn.Module, device: torch.device, exact: bool, all_gather: Callable[[list[str]], list[list[str]]]
) -> Iterator[None]:
    """A context for a step of an exact run, whose first micro-batches may run only those kernels of attention that
    repeat their bits. Collective. Errors: `RunError`, on every rank."""
    if not exact or device.type not in DEVICES:
        yield
        return
    with recorded(model) as names:
        yield
    if kernels := sorted({name for each in all_gather(refused(names)) for name in each}):
        raise RunError(
            "LS4183",
            f"model: its attention ran {', '.join(kernels)}, whose gradient may differ in bits from call to call; use "
            "another kernel (with transformers: model.attention=eager; with flash_attn: deterministic=True), or give "
            "up equal bits with strategy.exact=false",
        )
