#!/usr/bin/env bash
# torch 2.13.0, gloo: collectives of tensors that are views with strides. Seen, two processes, no error, no warning:
# all_reduce of a column of a matrix sums as many numbers as the column has, but those that lie next to each other in
# memory: [0, 6, 6, 9] where [0, 6, 12, 18] is due, in the matrix, too; broadcast of a matrix that rank 0 holds transposed,
# into one of the same shape that rank 1 does not, arrives in another order. all_gather of the same column is right.
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


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    column = torch.arange(12.0).view(4, 3)[:, 0]
    gathered = [torch.zeros(4), torch.zeros(4)]
    dist.all_gather(gathered, column)
    dist.all_reduce(column)
    transposed = torch.arange(6.0).view(2, 3).T
    matrix = transposed if rank == 0 else torch.zeros(3, 2)
    dist.broadcast(matrix, src=0)
    seen = [None, None]
    dist.all_gather_object(seen, (sum(gathered).tolist(), column.tolist(), matrix.tolist()))
    if rank == 0:
        print(f"column: gathered and added {seen[0][0]}, reduced {seen[0][1]}")
        print(f"matrix: of rank 0 {seen[0][2]}, broadcast to rank 1 {seen[1][2]}")
        assert seen[0][0] == seen[1][0] == [0.0, 6.0, 12.0, 18.0]
        assert seen[0][1] == seen[1][1] == [0.0, 6.0, 6.0, 9.0]
        assert seen[0][2] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert seen[1][2] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
