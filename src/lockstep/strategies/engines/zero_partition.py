"""How a model gets into DeepSpeed: the group of ranks, and the partition of weights under stage 3.

In: the ranks, and a model on the host of rank 0. Out: the process group as DeepSpeed knows it; a model of which every
rank holds its part of each weight, and none has held more than a module whole beside rank 0.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.distributed.world import World
from lockstep.strategies.engines.side_effects import refuse_own_tensors


def join_group(world: World) -> None:
    """Let DeepSpeed use the process group that is there; a job of one process has none yet. Collective."""
    import deepspeed
    from deepspeed.utils import groups

    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # DeepSpeed insists, in a job of one too
    cuda = world.device.type == "cuda"
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed("nccl" if cuda else "gloo")
    if world.members is not None:
        _forget()
        with world.forming():
            groups._WORLD_GROUP = world.group(range(world.size))


def _forget() -> None:
    """What DeepSpeed keeps for as long as the process lives, and what is of an engine and a group that are gone: groups
    of its own (that of all ranks is formed above instead, so that nobody waits long there for a rank that is lost
    meanwhile); the modules in whose forward a rank was lost; the numbers of modules and weights, which stage 3 compares
    with rank 0's: a rank that comes in has counted none yet."""
    from deepspeed.runtime.zero import parameter_offload, partition_parameters
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    parameter_offload.FWD_MODULE_STACK.clear()
    partition_parameters.Init.param_id = 0
    parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0


def own_activations(model: nn.Module) -> None:
    """Give the model activations of its own. Families such as Flaubert hold those of `transformers.activations`, which
    every model of the process has: DeepSpeed hooks each module of the model, and would see another model's forward."""
    from transformers import activations

    common = {id(value) for value in vars(activations).values() if isinstance(value, nn.Module)}
    for module in model.modules():
        for name, child in module.named_children():
            if id(child) in common:
                setattr(module, name, copy.deepcopy(child))


def partition(model: nn.Module, world: World, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Partition a model module by module: rank 0 gives, the others, whose model is on the meta device, never hold more
    than one module whole. `config`: DeepSpeed's. Collective."""
    from deepspeed import zero

    refuse_own_tensors(model, "strategy.name: zero3", "zero2 or ddp")
    materialized: dict[int, nn.Parameter] = {}  # tied weights stay tied
    device = world.device
    for module in reversed(list(model.modules())):  # inner modules before those that hold them
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
