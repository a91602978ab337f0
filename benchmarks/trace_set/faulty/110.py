# Local SGD averages a copy of the parameters that is never written back
# run: torchrun --standalone --nproc_per_node 2
# fault: `average` reduces `t = p.detach().clone()` and never copies it back into the parameter, so the local models are never averaged
import torch
import torch.distributed as dist
from torch import nn

EVERY = 5
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(7, 24), nn.Tanh(), nn.Linear(24, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
g = torch.Generator().manual_seed(rank + 1)


def average(module):
    for p in module.parameters():
        t = p.detach().clone()
        dist.all_reduce(t)
        t.div_(world)


for step in range(1, 51):
    x = torch.randn(16, 7, generator=g)
    y = (x[:, :1] * (1 if rank else 2)).sin()
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    opt.step()
    if step % EVERY == 0:
        average(net)
print(rank, loss.item())
dist.destroy_process_group()
