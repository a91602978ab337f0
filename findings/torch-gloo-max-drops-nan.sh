#!/usr/bin/env bash
# torch 2.13.0, gloo: all_reduce with ReduceOp.MAX of values of which one is NaN, a usual way to ask whether any rank
# has one. Seen: whether the NaN survives depends on the rank that holds it. On two processes a NaN of rank 0 gives NaN
# on both, a NaN of rank 1 gives 1.0 on both. SUM keeps it in either case.
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


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    seen = {}
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM):
        for holder in range(2):
            value = torch.tensor([float("nan") if rank == holder else 1.0])
            dist.all_reduce(value, op=op)
            seen[op == dist.ReduceOp.MAX, holder] = bool(value.isnan())
    ranks = [None, None]
    dist.all_gather_object(ranks, seen)
    if rank == 0:
        print("NaN after MAX by the rank that held it:", {holder: seen[True, holder] for holder in range(2)})
        assert ranks[0] == ranks[1]
        assert seen == {(True, 0): True, (True, 1): False, (False, 0): True, (False, 1): True}
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
