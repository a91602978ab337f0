#!/usr/bin/env bash
# accelerate 1.15.0: prepare, on two processes, of a DataLoader whose batch sampler makes batches by a budget (as by tokens),
# so that some are smaller than its batch_size. Seen: rows of batches that are smaller than batch_size are lost or come
# twice, with even_batches and without; len() and errors say nothing. With batch_size=None, even_batches=False, all come once.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
cd "$room"
cat > shown.py <<'PYTHON'
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader

ROWS = 11


class ByBudget(BatchSampler):
    def __init__(self, batch_size: int | None) -> None:
        self.sampler, self.batch_size, self.drop_last = range(ROWS), batch_size, False

    def __iter__(self):
        yield from ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10])

    def __len__(self) -> int:
        return 5


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    times = {}
    for most, even in ((4, True), (4, False), (None, False)):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
        loader = accelerator.prepare(DataLoader(torch.arange(ROWS), batch_sampler=ByBudget(most)))
        seen = [None, None]
        dist.all_gather_object(seen, [row for batch in loader for row in batch.tolist()])
        times[most, even] = [(seen[0] + seen[1]).count(row) for row in range(ROWS)]
    if rank == 0:
        for (most, even), counts in times.items():
            print(f"batch_size={most}, even_batches={even}: rows 0 to 10 come {counts} times")
        assert times[4, True] == [2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
        assert times[4, False] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
        assert times[None, False] == [1] * ROWS
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
