#!/usr/bin/env bash
# torch 2.13.0: the gradient of the greatest number of a DTensor sharded by rows: amax, and the infinity norm.
# Seen, two processes: the value is right, and so is the gradient if the greatest number is in rank 0's rows. If it is
# in rank 1's, the gradient is infinite there and NaN everywhere else, on both ranks, as if 1 were divided by how many
# of rank 0's numbers are as great. That of max() is right.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import math
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

OPERATIONS = {
    "max": torch.max,
    "amax": torch.amax,
    "infinity norm": lambda rows: torch.linalg.vector_norm(rows, math.inf),
}


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, greatest in OPERATIONS.items():
        for row in (0, 3):
            plain = torch.linspace(-1, 1, 12).view(4, 3)
            plain[row, 1] = 5.0
            plain.requires_grad_()
            (expected,) = torch.autograd.grad(greatest(plain), plain)
            sharded = distribute_tensor(plain.detach(), mesh, [Shard(0)]).requires_grad_()
            value = greatest(sharded)
            value.backward()
            gradient, whole = sharded.grad.full_tensor(), value.full_tensor().item()
            nans = int(gradient.isnan().sum())
            if rank == 0:
                print(f"{name} with 5 in row {row}: {whole}, gradient there {gradient[row, 1]}, {nans} NaN")
            assert whole == 5
            if name != "max" and row == 3:
                assert nans == 11
                assert gradient[3, 1] == math.inf
            else:
                assert torch.equal(gradient, expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
