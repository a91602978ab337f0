#!/usr/bin/env bash
# torch 2.13.0: an Embedding with `max_norm` shortens the rows that it reads, in place, in the forward pass. On two processes
# that goes wrong without a word. DistributedDataParallel: each rank shortens the rows of its own batch only, so the ranks'
# weights are no longer equal. fully_shard: the rows of the gathered copy are shortened, and that copy is thrown away, so
# the weights that are kept, trained and saved stay as long as they were.
# Run on 2026-11-30.
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
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(4, 8, max_norm=1.0)
    return torch.nn.Sequential(embedding, torch.nn.Linear(8, 1))


def norms(trained: torch.nn.Module, rows: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        trained(rows).mean().backward()
        optimizer.step()
    weight = next(trained.parameters()).detach()
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return [round(norm, 2) for norm in weight.norm(dim=1).tolist()]


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    rows = torch.tensor([[0, 1], [2, 3]])[rank]
    single = norms(model(), torch.arange(4))
    copies = [None, None]
    dist.all_gather_object(copies, norms(DistributedDataParallel(model()), rows))
    sharded = model()
    for part in (*sharded, sharded):
        fully_shard(part, mesh=mesh)
    kept = norms(sharded, rows)
    if rank == 0:
        print(f"lengths of the rows, one process: {single}")
        print(f"DistributedDataParallel: rank 0 {copies[0]}, rank 1 {copies[1]}")
        print(f"fully_shard: {kept}")
        assert max(single) < 1.1
        assert copies[0] != copies[1]
        assert max(copies[0][:2]) < 1.1 < min(copies[0][2:])
        assert max(copies[1][2:]) < 1.1 < min(copies[1][:2])
        assert min(kept) > 1.1
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
