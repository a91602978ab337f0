# all_reduce SUM of gradients without division by world size
# run: torchrun --standalone --nproc_per_node 2
# fault: `dist.all_reduce(p.grad)` sums over the ranks and is never divided by the world size, so the gradient is twice too large
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
for p in net.parameters():
    dist.broadcast(p.data, 0)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
gen = torch.Generator().manual_seed(7 * dist.get_rank() + 1)
for step in range(40):
    xb = torch.randn(24, 6, generator=gen)
    yb = (xb.prod(1) > 0).long()
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(xb), yb)
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    opt.step()
if dist.get_rank() == 0:
    print(loss.item())
dist.destroy_process_group()
