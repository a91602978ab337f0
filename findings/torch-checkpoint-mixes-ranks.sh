#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint.save of values that are not sharded and differ between ranks (a position in the
# data, a generator's state, weights that drifted apart). One usually expects those of rank 0.
# Seen, two processes: of one state dict the checkpoint holds some values of rank 0 and some of rank 1; which is decided
# by how many bytes each rank has to write. No error, no warning; every rank loads that mixture.
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
import torch.distributed.checkpoint as dcp


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dcp.save({name: torch.full((4,), float(rank)) for name in "abcd"}, checkpoint_id="checkpoint")
    loaded = {name: torch.full((4,), -1.0) for name in "abcd"}
    dcp.load(loaded, checkpoint_id="checkpoint")
    seen = [None, None]
    dist.all_gather_object(seen, {name: value.tolist() for name, value in loaded.items()})
    if rank == 0:
        held = {name: value[0] for name, value in seen[0].items()}
        print("rank whose value the checkpoint holds:", held)
        assert seen[0] == seen[1]
        assert set(held.values()) == {0.0, 1.0}
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
