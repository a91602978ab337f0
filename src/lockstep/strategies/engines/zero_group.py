"""The process group that DeepSpeed works in: the job's own.

In: a rank that has met the others. Out: DeepSpeed that knows of this group and of none before it.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from lockstep.distributed.world import World


def join(world: World) -> None:
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
