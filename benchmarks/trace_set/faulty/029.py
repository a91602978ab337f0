# Same seed on both ranks gives the same dropout mask and augmentation
# run: torchrun --standalone --nproc_per_node 2
# fault: `set_seed(SEED)` gives the same generator state to both ranks and the data noise and dropout masks are drawn from it, so both ranks draw identical noise
import random
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 2024


def set_seed(s):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)


dist.init_process_group("gloo")
set_seed(SEED)
x = torch.randn(480, 3, 8)
y = x.mean((1, 2)).gt(0).long()
ds = TensorDataset(x, y)
sampler = DistributedSampler(ds, seed=SEED)
net = DDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(24, 64), torch.nn.ReLU(), torch.nn.Dropout(0.5),
                              torch.nn.Linear(64, 2)))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(ds, batch_size=24, sampler=sampler):
        shift = torch.randint(0, 8, ()).item()
        a = torch.roll(a, shift, dims=2) + 0.3 * torch.randn_like(a)
        loss = torch.nn.functional.cross_entropy(net(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(dist.get_rank(), epoch, loss.item())
dist.destroy_process_group()
