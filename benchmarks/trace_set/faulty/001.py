# DistributedSampler without set_epoch, same order each epoch
# run: torchrun --standalone --nproc_per_node 2
# fault: no `sampler.set_epoch(epoch)` at the top of the epoch loop `for ep in range(args_epochs)`, so every epoch has the same order
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Spiral(Dataset):
    def __init__(self, n=600):
        t = torch.linspace(0, 3, n)
        k = torch.arange(n) % 3
        a = t * 2 + k * 2.1
        self.x = torch.stack([t * a.cos(), t * a.sin()], 1)
        self.k = k

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.k[i]


dist.init_process_group("gloo")
args_epochs = 5
torch.manual_seed(0)
ds = Spiral()
sampler = DistributedSampler(ds, shuffle=True)
dl = DataLoader(ds, batch_size=30, sampler=sampler)
net = DDP(torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for ep in range(args_epochs):
    tot = 0.0
    for x, k in dl:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), k)
        loss.backward()
        opt.step()
        tot += loss.item()
    if dist.get_rank() == 0:
        print(ep, tot / len(dl))
dist.destroy_process_group()
