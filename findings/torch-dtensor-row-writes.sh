#!/usr/bin/env bash
# torch 2.13.0: a write into rows of a DTensor that is sharded by rows. Indexing gathers the tensor, so the write goes to a
# copy: no error, no warning, and nothing is written. (pytorch issue 139735 has it for slices; indexing by a number raised an
# error then.) So an Embedding that is sharded by fully_shard and drawn by its own reset_parameters, the usual way of a model
# from the meta device, has numbers where the row of padding_idx should be zero.
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    ones = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    ones[0].zero_()
    ones[1:3].mul_(7)
    columns = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    columns[:, 0].zero_()
    model = torch.nn.Sequential(torch.nn.Embedding(6, 4, padding_idx=0, device="meta"))
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    model[0].reset_parameters()
    rows, column = ones.full_tensor(), columns.full_tensor()
    row, plain = model[0].weight.full_tensor()[0], torch.nn.Embedding(6, 4, padding_idx=0).weight[0]
    if rank == 0:
        print("written into rows", rows.tolist(), "into a column", column.tolist())
        print("row of padding_idx", row.tolist(), "without sharding", plain.tolist())
    assert (rows == 1).all()
    assert (column == torch.tensor([0.0, 1.0])).all()
    assert (row != 0).all() and (plain == 0).all()
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
