# DDP with each rank reading its own contiguous partition of rows, cut to equal length
# run: torchrun --standalone --nproc_per_node 2
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS = 1001
BATCH = 25


def load_all():
    rs = np.random.RandomState(5)
    a = rs.randn(ROWS, 5).astype("float32")
    b = (a ** 2).sum(1, keepdims=True).astype("float32")
    return a, b


def my_part(a, b, rank, world):
    per = len(a) // world  # drop the rest so that every rank has the same number of batches
    s = slice(rank * per, (rank + 1) * per)
    return torch.from_numpy(a[s]), torch.from_numpy(b[s])


def run():
    dist.init_process_group("gloo")
    r, ws = dist.get_rank(), dist.get_world_size()
    X, Y = my_part(*load_all(), r, ws)
    torch.manual_seed(11)
    m = DDP(torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.SiLU(), torch.nn.Linear(32, 1)))
    o = torch.optim.Adam(m.parameters(), 5e-3)
    shuffler = torch.Generator().manual_seed(1000 + r)
    for ep in range(3):
        perm = torch.randperm(len(X), generator=shuffler)
        run_loss = 0.0
        nb = len(perm) // BATCH
        for i in range(nb):
            j = perm[i * BATCH:(i + 1) * BATCH]
            o.zero_grad()
            loss = (m(X[j]) - Y[j]).pow(2).mean()
            loss.backward()
            o.step()
            run_loss += loss.item()
        t = torch.tensor([run_loss / nb])
        dist.all_reduce(t)
        if r == 0:
            print(ep, (t / ws).item())
    dist.destroy_process_group()


run()
