# Two-process local SGD: parameters averaged every four steps
# run: torchrun --standalone --nproc_per_node 2
import torch
import torch.distributed as dist
from torch import nn

H = 4  # local steps between averages
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # same start everywhere
net = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(rank)


@torch.no_grad()
def average():
    for p in net.parameters():
        dist.all_reduce(p)
        p /= world


for step in range(1, 41):
    x = torch.randn(32, 5, generator=gen)
    loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True).sin())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % H == 0:
        average()
print(rank, loss.item(), sum(p.sum().item() for p in net.parameters()))
dist.destroy_process_group()
