"""A script that trains three steps in as many processes as its launcher starts: spawn, env, srun, ray or alone.

It imports torch and, for `ray`, Ray. Every launcher has it train the same.
"""

import os
import sys

import torch
from torch import distributed as dist
from torch import nn


def train(rank: int, world: int, port: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    model = nn.parallel.DistributedDataParallel(plain) if world > 1 else plain
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        rows = torch.randn(8, 4, generator=generator)[rank::world]
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    if world > 1:
        del model
        dist.destroy_process_group()


def by_ray(port: str) -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False)
    ray.get([ray.remote(train).remote(rank, 2, port) for rank in range(2)])
    ray.shutdown()


if __name__ == "__main__":
    how, port = sys.argv[-2:]  # DeepSpeed puts one of its own in front
    if how == "spawn":
        torch.multiprocessing.spawn(train, (2, port), nprocs=2)
    elif how == "env":
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_PORT"])
    elif how == "srun":
        train(int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]), port)
    elif how == "ray":
        by_ray(port)
    else:
        train(0, 1, port)
