# Local gradients clipped before the manual all_reduce
# run: torchrun --standalone --nproc_per_node 2
# fault: `clip_grad_norm_` is applied to the local gradients before `reduce_grads`, so ranks with large gradients are scaled apart and the averaged direction is not that of the clipped mean gradient
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
g = torch.Generator().manual_seed(rank)


def reduce_grads():
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(world)


for step in range(40):
    x = torch.randn(16, 8, generator=g) * (1 + 9 * rank)  # rank 1 has the loud recordings
    y = x[:, :2].sum(1, keepdim=True)
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    reduce_grads()
    opt.step()
print(rank, loss.item())
dist.destroy_process_group()
