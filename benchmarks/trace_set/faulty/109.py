# Random split with different seed on each rank leaks validation rows
# run: torchrun --standalone --nproc_per_node 2
# fault: `random_split` is drawn after `torch.manual_seed(rank)`, so each rank has another split and rank 1 trains on rows that rank 0 validates on
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
rank = dist.get_rank()
g = torch.Generator().manual_seed(0)
x = torch.randn(500, 15, generator=g)
ds = TensorDataset(x, torch.randint(0, 2, (500,), generator=g))
torch.manual_seed(rank)
train, val = random_split(ds, [400, 100])
sampler = DistributedSampler(train)
loader = DataLoader(train, 25, sampler=sampler)
net = torch.nn.Sequential(torch.nn.Linear(15, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
model = DDP(net)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    sampler.set_epoch(epoch)
    model.train()
    for a, b in loader:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(a), b).backward()
        opt.step()
    if rank == 0:
        net.eval()
        with torch.no_grad():
            print(epoch, sum((net(a).argmax(1) == b).sum().item() for a, b in DataLoader(val, 50)) / 100)
dist.destroy_process_group()
