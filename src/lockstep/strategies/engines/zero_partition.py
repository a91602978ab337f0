"""Passing a model to DeepSpeed: the process group, and the partition of weights in stage 3.

In: the ranks, and a model in rank 0's host memory. Out: the process group registered with DeepSpeed; a model of which
every rank holds its part of each weight, while no rank but 0 ever holds more than one module whole.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.distributed.rendezvous import join_alone
from lockstep.distributed.world import World
from lockstep.strategies.engines.side_effects import refuse_own_tensors


def join_group(world: World) -> None:
    """Let DeepSpeed use the existing process group; creates one in a job of one process. Collective."""
    import deepspeed
    from deepspeed.utils import groups

    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # DeepSpeed requires it, even in a job of one process
    cuda = world.device.type == "cuda"
    if not dist.is_initialized():
        join_alone("cpu:gloo,cuda:nccl" if cuda else "gloo")
    deepspeed.init_distributed("nccl" if cuda else "gloo")
    if world.members is not None:
        _forget()
        with world.forming():
            groups._WORLD_GROUP = world.group(range(world.size))


def _forget() -> None:
    """Reset DeepSpeed's process-wide state of an earlier engine and group: its own groups (that of all ranks is formed
    by the caller instead, so that no rank waits long for one that fails meanwhile); the modules in whose forward a rank
    failed; the counters of modules and weights, which stage 3 compares with rank 0's and which are zero on a new
    rank."""
    from deepspeed.runtime.zero import parameter_offload, partition_parameters
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    parameter_offload.FWD_MODULE_STACK.clear()
    partition_parameters.Init.param_id = 0
    parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0


def own_activations(model: nn.Module) -> None:
    """Give the model its own activation modules. Families such as Flaubert share those of `transformers.activations`
    with every model of the process: DeepSpeed hooks each module, and would see another model's forward."""
    from transformers import activations

    common = {id(value) for value in vars(activations).values() if isinstance(value, nn.Module)}
    for module in model.modules():
        for name, child in module.named_children():
            if id(child) in common:
                setattr(module, name, copy.deepcopy(child))


def partition(model: nn.Module, world: World, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Partition a model module by module: rank 0 sends the weights; the other ranks' models are on the meta device and
    never hold more than one module whole. `config`: DeepSpeed's. Collective."""
    from deepspeed import zero

    refuse_own_tensors(model, "strategy.name: zero3", "zero2 or ddp")
    materialized: dict[int, nn.Parameter] = {}  # tied weights stay tied
    device = world.device
    for module in reversed(list(model.modules())):  # inner modules first
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                if id(parameter) not in materialized:
                    real = torch.empty(parameter.shape, dtype=dtype, device=device)
                    materialized[id(parameter)] = nn.Parameter(real, parameter.requires_grad)
                module._parameters[name] = materialized[id(parameter)]
            elif not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            real = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            dist.broadcast(real, src=0)
            module._buffers[name] = real
        if next(module.parameters(), None) is not None:
            zero.Init(module=module, config_dict_or_path=config, dtype=dtype)
