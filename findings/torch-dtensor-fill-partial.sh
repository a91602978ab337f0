#!/usr/bin/env bash
# torch 2.13.0: fill_ of a DTensor whose placement is Partial, which is a sum that has not been made yet. Adding a number to
# it in place raises an error; filling does not. Seen on two processes: each rank fills its summand, so the tensor is then
# 6 everywhere after fill_(3), and so is empty_like(x).fill_(3). full_like(x, 3) and ones_like(x) are right.
# Run on 2026-11-29.
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
from torch.distributed.tensor import DTensor, Partial, init_device_mesh


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    partial = DTensor.from_local(torch.full((2,), 1.0 + rank), init_device_mesh("cpu", (2,)), [Partial()])
    assert partial.full_tensor().tolist() == [3.0, 3.0]
    filled = {
        "full_like(x, 3)": torch.full_like(partial, 3.0),
        "empty_like(x).fill_(3)": torch.empty_like(partial).fill_(3.0),
        "x.fill_(3)": partial.fill_(3.0),
    }
    held = {name: tensor.full_tensor().tolist() for name, tensor in filled.items()}
    if rank == 0:
        print(held)
    assert held["full_like(x, 3)"] == [3.0, 3.0]
    assert held["empty_like(x).fill_(3)"] == held["x.fill_(3)"] == [6.0, 6.0]
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
