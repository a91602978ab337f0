"""Training of one small model in pipeline stages, with tensor parallelism, or with a sharded optimizer, on the same
batches as one process.

    python parallel.py [--cut tensor|tensor-data|stages|optimizer] [--batch N] [--micro N] [--fault NAME]

It imports torch alone.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--cut", default="")
parser.add_argument("--batch", type=int, default=32, help="of all processes")
parser.add_argument("--micro", type=int, default=2, help="micro-batches, of stages")
parser.add_argument("--fault", default="")
a = parser.parse_args()
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """`first` and `last` are absent from a stage that does not hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module | None = nn.Linear(8, 16)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.last: nn.Module | None = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) if self.first is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.last(x) if self.last is not None else x


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(5 * a.batch, 8, generator=torch.Generator().manual_seed(3))
    return list(zip(x.split(a.batch), x[:, :4].argmax(1).split(a.batch), strict=True))


def cut_by_tensors(net: Net) -> tuple[nn.Module, int, int]:
    """Returns the model, and this process's place among those that see other examples."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    data = 2 if a.cut == "tensor-data" else 1
    mesh = init_device_mesh("cpu", (data, world // data), mesh_dim_names=("dp", "tp"))
    for block in net.blocks.values():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if data > 1:
        fully_shard(net, mesh=mesh["dp"])
    return net, data, mesh.get_local_rank("dp")


def by_stages(net: Net) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    del net.blocks[str(1 - rank)]
    net.first, net.last = (net.first, None) if rank == 0 else (None, net.last)
    stage = PipelineStage(net, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(
        stage, a.micro, loss_fn=nn.functional.cross_entropy, scale_grads=a.fault != "grads-not-scaled"
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for x, y in batches():
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
        optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    net = Net()
    if world > 1:
        dist.init_process_group("gloo")
    if a.cut == "stages":
        by_stages(net)
        return
    model, data, place = net, 1, 0
    if a.cut.startswith("tensor"):
        model, data, place = cut_by_tensors(net)
    elif world > 1:
        model, data, place = nn.parallel.DistributedDataParallel(net), world, rank
    if a.cut == "optimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.chunk(data)[place]), y.chunk(data)[place]).backward()
        optimizer.step()


main()
