# Two processes with metric all_reduce of sum and count for uneven validation shards
# run: torchrun --standalone --nproc_per_node 2
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def evaluate(net, loader):
    net.eval()
    acc = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            l = torch.nn.functional.cross_entropy(net(x), y, reduction="sum")
            acc += torch.tensor([l.item(), len(y)], dtype=torch.float64)
    dist.all_reduce(acc)  # shards have 50 and 51 rows, so sums and counts are added, not means
    return (acc[0] / acc[1]).item(), int(acc[1])


dist.init_process_group("gloo")
rank, ws = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
x = torch.randn(501, 7)
y = (x.abs().sum(1) > 5.5).long()
full = TensorDataset(x, y)
train, val = Subset(full, range(400)), Subset(full, range(400, 501))
sampler = DistributedSampler(train)
loader = DataLoader(train, 20, sampler=sampler)
vloader = DataLoader(Subset(val, range(rank, len(val), ws)), 20)
net = torch.nn.Sequential(torch.nn.Linear(7, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
ddp = DDP(net)
opt = torch.optim.Adam(ddp.parameters(), 5e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    ddp.train()
    for a, b in loader:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(ddp(a), b).backward()
        opt.step()
    v, n = evaluate(net, vloader)
    if rank == 0:
        print(epoch, v, n)
dist.destroy_process_group()
