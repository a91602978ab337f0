"""Options of a model's layers: compiled, recomputed in backward, saved activations on the host.

In: the keys `compile`, `checkpoint_activations` and `offload_activations` of `model`, and a model that no engine has
wrapped. Out: the same model, names and all. Only `forward` of each layer is replaced: hooks of engines stay outside, so
that they run once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lockstep.config.run import Run, RunError
from lockstep.strategies.engines import compiled, layers
from lockstep.strategies.exact.statistics import averaged
from lockstep.tasks.models.model_configs import load_config

KEYS = ("compile", "checkpoint_activations", "offload_activations")  # of `model`
_ENGINES_OWN = {
    "compile": ("torch_compile",),
    "checkpoint_activations": ("gradient_checkpointing", "activation_checkpointing"),
}
SMALL = 64 * 1024  # bytes of a tensor that is not worth the way to the host

Forward = Callable[..., Any]


def check(run: Run, here: bool) -> None:
    """Before any process starts. `here`: the ranks will run on machines like this one. Errors: `RunError`."""
    asked = [key for key in KEYS if getattr(run.model, key)]
    if not asked or layers.own_model(run):  # the task says that `model` is of no use
        return
    options = run.strategy.options | dict(run.strategy.options.get("fsdp") or {})
    for key, theirs in _ENGINES_OWN.items():
        if key in asked and (twice := next((option for option in theirs if options.get(option)), None)):
            raise RunError(f"model.{key}: strategy.options.{twice} does the same once more; leave one of them out")
    gpu = run.launch.device != "cpu" and not (here and not torch.cuda.is_available())
    if run.model.offload_activations and not gpu:
        raise RunError(
            "model.offload_activations: what layers save goes from a GPU's memory to the host's, and this job has no "
            "GPU; model.checkpoint_activations saves memory everywhere"
        )
    if run.model.compile and here:
        compiled.check(on_gpu=gpu and torch.cuda.is_available())
    if "." not in run.task.name:
        _check_model(run, asked)


def _check_model(run: Run, asked: list[str]) -> None:
    """Look at the family's layers, without memory. What cannot be built so is found out when it is built."""
    from transformers import AutoModel

    config = load_config(run)
    config.architectures = config.architectures or []  # which transformers walks through for a Funnel
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config, trust_remote_code=run.model.trust_remote_code)
    except Exception:  # code from the Hub, sizes that do not fit: each has a message of its own later
        return
    _layers_of(model, asked)


def _layers_of(model: nn.Module, asked: list[str]) -> list[nn.Module]:
    """The layers of a model for which all that is `asked` is possible. Errors: `RunError`."""
    blocks = layers.blocks(model)
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not blocks:
        raise RunError(
            f"model.{asked[0]}: no layers of {kind} were found that run once, each by itself; leave {asked[0]} out"
        )
    if "checkpoint_activations" not in asked:
        return blocks
    instead = "leave it out, or use more micro_batches, which need less memory"
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise RunError(f"model.checkpoint_activations: transformers does not compute layers of {kind} again; {instead}")
    if any(averaged(block) for block in blocks):
        raise RunError(
            f"model.checkpoint_activations: layers of {kind} keep running statistics, which would be moved twice; "
            f"{instead}"
        )
    return blocks


def prepare(run: Run, model: nn.Module) -> None:
    """Replace the layers' `forward` as the run says, in place. Errors: `RunError`."""
    asked = [key for key in KEYS if getattr(run.model, key)]
    for block in _layers_of(model, asked) if asked else ():
        forward: Forward = block.forward
        if run.model.compile:
            forward = compiled.in_training(block, forward)
        if run.model.checkpoint_activations:
            forward = partial(_again, block, forward)
        if run.model.offload_activations:
            forward = partial(_on_host, block, forward)
        block.forward = forward


def saves(block: nn.Module) -> bool:
    """Whether what a layer computes now is for a backward."""
    return block.training and torch.is_grad_enabled()


# -- computed again --------------------------------------------------------------------------------------------------


def _again(block: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep the inputs only, and run `forward` once more in backward, from the same random numbers and under the same
    autocast. The graph is the first run's, so gradients are added up in the same order."""
    if not saves(block):
        return forward(*args, **kwargs)
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=_same_numbers)


def _same_numbers() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What `checkpoint` enters around the first run and around the second one. It restores torch's generators by
    itself, these are Python's and numpy's."""
    return nullcontext(), _from(random.getstate(), np.random.get_state())


@contextmanager
def _from(python: Any, numpy: Any) -> Iterator[None]:
    now = random.getstate(), np.random.get_state()
    random.setstate(python)
    np.random.set_state(numpy)
    try:
        yield
    finally:
        random.setstate(now[0])
        np.random.set_state(now[1])


# -- on the host -----------------------------------------------------------------------------------------------------


def _on_host(block: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """With `_again` inside, what is moved are the layer's inputs."""
    if not saves(block):
        return forward(*args, **kwargs)
    with OnHost({p.untyped_storage().data_ptr() for p in block.parameters()}):
        return forward(*args, **kwargs)


class OnHost(saved_tensors_hooks):
    """Tensors that autograd saves in here wait in page-locked memory of the host. Weights stay where they are: they
    would be there all the same. The host waits for each copy, so that the device's memory is free at once."""

    def __init__(self, weights: set[int], device: str = "cuda") -> None:
        """`weights`: the storages' addresses; `device`: whose tensors are moved."""

        def pack(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
            stays = tensor.device.type != device or tensor.nbytes < SMALL
            if stays or tensor.untyped_storage().data_ptr() in weights:
                return None, tensor
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=device == "cuda")
            return tensor.device, host.copy_(tensor)

        def unpack(packed: tuple[torch.device | None, Tensor]) -> Tensor:
            place, tensor = packed
            return tensor if place is None else tensor.to(place, non_blocking=True, copy=True)

        super().__init__(pack, unpack)
