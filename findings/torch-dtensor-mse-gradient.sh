#!/usr/bin/env bash
# torch 2.13.0: mse_loss of two DTensors that are sharded by rows. The loss of four rows on two processes is right, and its
# gradient is twice that of the same tensors without sharding: with N processes, N times. huber_loss, smooth_l1_loss and
# soft_margin_loss do the same. Of five rows, three on one process and two on the other, the loss is wrong as well: the mean
# of the two means (Tensor.mean had that error until 2.9; see pytorch issue 162692), as that of
# binary_cross_entropy_with_logits is. l1_loss, and (x - y).square().mean(), are right.
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
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def loss_and_gradient(loss, x: torch.Tensor, y: torch.Tensor, mesh=None) -> tuple[float, torch.Tensor]:
    if mesh is None:
        x = x.clone().requires_grad_()
        value = loss(x, y)
        value.backward()
        return value.item(), x.grad
    x = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    value = loss(x, distribute_tensor(y, mesh, [Shard(0)]))
    value.backward()
    return value.full_tensor().item(), x.grad.full_tensor()


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    losses = {
        "mse_loss": F.mse_loss,
        "huber_loss": F.huber_loss,
        "smooth_l1_loss": F.smooth_l1_loss,
        "by hand": lambda x, y: (x - y).square().mean(),
    }
    torch.manual_seed(0)
    for rows in (4, 5):
        x, y = torch.randn(rows, 3), torch.randn(rows, 3)
        for name, loss in losses.items():
            value, gradient = loss_and_gradient(loss, x, y)
            sharded_value, sharded_gradient = loss_and_gradient(loss, x, y, mesh)
            times = (sharded_gradient / gradient).nan_to_num(1.0)[:, 0]
            if rank == 0:
                print(rows, name, "loss", round(value, 4), "sharded", round(sharded_value, 4), "gradients", times.tolist())
            right = name == "by hand"
            assert (abs(value - sharded_value) < 1e-5) == (right or rows == 4)
            assert torch.allclose(times, torch.ones(rows), atol=1e-4) == right
            assert rows == 5 or right or torch.allclose(times, torch.full((4,), 2.0), atol=1e-4)
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
