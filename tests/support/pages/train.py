import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16, help="examples a process")
arguments = parser.parse_args()
world = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0))
if world > 1:
    dist.init_process_group("gloo")

torch.manual_seed(0)
inputs = torch.randn(512, 8)
labels = (inputs.sum(dim=1) > 0).long()
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
trained = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
data = TensorDataset(inputs, labels)
sampler = DistributedSampler(data, world, rank, shuffle=True, seed=0)
loader = DataLoader(data, batch_size=arguments.batch, sampler=sampler)

for epoch in range(2):  # noqa: B007
    for texts, answers in loader:
        loss = nn.functional.cross_entropy(trained(texts), answers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
if rank == 0:
    print(f"loss {loss.item():.3f}")
if world > 1:
    dist.destroy_process_group()
