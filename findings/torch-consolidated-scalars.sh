#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint with HuggingFaceStorageWriter, which writes the ranks' parts as safetensors
# and, with enable_consolidation, one file of whole tensors from them.
# Seen: a tensor without dimensions, as CLIP's logit_scale, is in the parts with its value, and in the one file as 0.
# Tensors with dimensions are right, also where a rank has no rows. NeMo Automodel mended its own copy (its pull request
# 301).
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 fsspec==2026.9.0
cd "$room"
cat > shown.py <<'PYTHON'
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=3)
    whole = torch.arange(12.0).view(4, 3)  # 2, 2 and 0 rows
    weights = {
        "rows": distribute_tensor(whole, init_device_mesh("cpu", (3,)), [Shard(0)]),
        "logit_scale": torch.tensor(2.6592),
        "one": torch.tensor([2.6592]),
    }
    writer = HuggingFaceStorageWriter("saved", save_distributed=True, enable_consolidation=True)
    dcp.save(weights, storage_writer=writer)
    if rank == 0:
        (file,) = Path("saved").glob("*.safetensors")
        loaded = load_file(file)
        every = map(load_file, Path("saved/sharded").iterdir())
        parts = [part["logit_scale"] for part in every if "logit_scale" in part]
        print("logit_scale in the parts:", parts, "in the one file:", loaded["logit_scale"])
        print("a tensor of one number in the one file:", loaded["one"])
        assert torch.equal(loaded["rows"], whole)
        assert torch.equal(loaded["one"], weights["one"])
        assert [part.item() for part in parts] == [weights["logit_scale"].item()]
        assert loaded["logit_scale"].item() == 0
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=3)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
