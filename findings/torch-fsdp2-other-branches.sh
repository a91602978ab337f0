#!/usr/bin/env bash
# torch 2.13.0: fully_shard of one module with two branches, of which two ranks take one each (as experts do, or heads of
# several tasks). Where DDP with find_unused_parameters gives each branch half of its rank's gradient, FSDP2 adds the
# gradients of *different* branches: they have equal shapes and lie in the same place of each rank's buffer.
# Seen, gloo on two processes: each rank has a gradient for its own branch alone, and it is the mean of both branches'
# (2.0) where half of one is due (0.5 and 1.5). No error, no warning.
# Run on 2026-11-28.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[dist.get_rank()](x)


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x = torch.full((1, 2), 1.0 + 2 * rank)  # gradients of 1 and 3 in each element of the branch
    rows = {}
    for name in ("DDP", "FSDP2"):
        torch.manual_seed(0)
        model = Branches()
        if name == "DDP":
            replica = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            replica(x).sum().backward()
            mine = [p.grad[rank, 0].item() for p in model.parameters()]
        else:
            fully_shard(model)(x).sum().backward()
            mine = [None if p.grad is None else p.grad.to_local()[0, 0].item() for p in model.parameters()]
        rows[name] = [None, None]
        dist.all_gather_object(rows[name], mine)
    if rank == 0:
        for name, seen in rows.items():
            print(f"{name}: gradient of (branch 0, branch 1) on rank 0 {seen[0]}, on rank 1 {seen[1]}")
        assert rows["DDP"] == [[0.5, 1.5], [0.5, 1.5]]
        assert rows["FSDP2"] == [[2.0, None], [None, 2.0]]
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
