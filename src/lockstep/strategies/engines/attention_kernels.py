"""Which attention kernels a step ran, by the names under which torch's dispatcher calls them.

In: a step to watch. Out: a refusal if a kernel ran whose gradient need not repeat its bits. Libraries choose kernels by
device, shapes and version: torch's nightlies prefer cuDNN, whose backward torch does not hold deterministic even under
`torch.use_deterministic_algorithms` (pytorch#187770). Operations that a compiled micro-batch calls are checked in its
code instead (`region.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from lockstep.config.run import RunError

DEVICES = ("cuda",)  # on CPUs, torch has no kernel of attention that varies
ATTENTION = re.compile(r"\w+::\w*(attention|attn)\w*$")

# Under torch's deterministic switch these repeat their bits: torch's flash attention has a deterministic backward, its
# memory-efficient attention computes a row's gradient in one block, and `math` consists of matrix products.
REPEATING = re.compile(
    r"aten::(scaled_dot_product_attention|_scaled_dot_product_attention_math"
    r"|_scaled_dot_product_(flash|efficient)_attention(_for_cpu)?(_backward)?"
    r"|_(flash|efficient)_attention_(forward|backward))$"
    r"|torch_attn::_varlen_attn(_backward)?$|lockstep::attention(_backward)?$"
    r"|flash_attn::_flash_attn_(varlen_)?(forward|backward)$"  # with its option, which `World` sets
)


@contextmanager
def recorded() -> Iterator[set[str]]:
    """A context that yields a set, to which it adds the names of the operations that ran within it."""
    from torch.profiler import ProfilerActivity, profile

    names: set[str] = set()
    with profile(activities=[ProfilerActivity.CPU]) as watching:
        yield names
    results = watching.profiler.kineto_results if watching.profiler is not None else None
    names |= {event.name() for event in results.events()} if results is not None else set()


def refused(names: Iterable[str]) -> list[str]:
    """Return those attention kernels among operations that are not known to repeat their bits, sorted."""
    return sorted(name for name in {*names} if ATTENTION.match(name) and not REPEATING.match(name))


@contextmanager
def checked(device: torch.device, exact: bool, all_gather: Callable[[list[str]], list[list[str]]]) -> Iterator[None]:
    """A context for a step of an exact run, in which only kernels of attention may run that repeat their bits.
    Collective. Errors: `RunError`, on every rank."""
    if not exact or device.type not in DEVICES:
        yield
        return
    with recorded() as names:
        yield
    if kernels := sorted({name for each in all_gather(refused(names)) for name in each}):
        raise RunError(
            "LS4183",
            f"model.attention: this model's attention ran {', '.join(kernels)}, not known to give a gradient the same "
            "bits twice; set model.attention=eager, or give up equal bits with strategy.exact=false",
        )
