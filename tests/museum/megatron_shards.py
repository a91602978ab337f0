"""Training by Megatron-FSDP on one process, or by torch alone, of one small model on the same batches.

python megatron_shards.py [--strategy N] [--batch N] [--accumulate N]      a strategy of -1 is torch alone

Strategies 2 and 3 shard gradients, and 3 parameters as well. The library is written for CUDA: without a GPU its streams
are stood in for, and what it computes is its own.
"""

import argparse
import contextlib
import os
import socket
from typing import Any

import torch
from torch import distributed, nn

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", type=int, default=-1)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--optimizer", default="SGD")
a = parser.parse_args()


class Queue:
    """A stream or an event of a device that computes at once."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self


def without_cuda() -> None:
    """Replace the CUDA functions that Megatron-FSDP calls, so that it runs on a CPU."""
    torch.cuda.Stream = torch.cuda.Event = lambda *args, **options: Queue()  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *args: Queue()  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.cuda.current_device = lambda: 0
    torch.Tensor.cuda = lambda tensor: tensor  # type: ignore[method-assign,assignment]
    distributed._make_nccl_premul_sum = lambda factor: distributed.ReduceOp.SUM  # type: ignore[attr-defined]


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Both, by Megatron-FSDP on a world of one rank."""
    if device.type == "cpu":
        without_cuda()
    from megatron_fsdp import fully_shard

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo" if device.type == "cpu" else "nccl")
    mesh = distributed.init_device_mesh(device.type, (1, 1), mesh_dim_names=("shard", "tensor"))
    where = {"device_mesh": mesh, "dp_shard_dim": "shard", "tp_dim": "tensor", "device": device}
    options = {"zero_dp_strategy": a.strategy, "fsdp_unit_modules": [nn.Linear], "sync_model_each_microbatch": False}
    return fully_shard(model, optimizer, **where, **options)  # type: ignore[no-any-return]


device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
torch.manual_seed(0)
model: Any = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(device)
x = torch.randn(128, 12)
y = x[:, :4].argmax(1)
optimizer = getattr(torch.optim, a.optimizer)(model.parameters(), lr=1e-2, weight_decay=0.0)
if a.strategy >= 0:
    model, optimizer = sharded(model, optimizer)
for i, rows in enumerate(torch.arange(128).split(a.batch)):
    last = (i + 1) % a.accumulate == 0
    if a.strategy >= 0:
        model.set_model_auto_sync(last)
    loss = nn.functional.cross_entropy(model(x[rows].to(device)), y[rows].to(device))
    (loss / a.accumulate).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
if distributed.is_initialized():
    distributed.destroy_process_group()
