# DDP with GroupNorm and find_unused_parameters for a conditional branch
# run: torchrun --standalone --nproc_per_node 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(8, 32), nn.GroupNorm(4, 32), nn.ReLU())
        self.left, self.right = nn.Linear(32, 2), nn.Linear(32, 2)

    def forward(self, x, use_left):
        h = self.inp(x)
        return self.left(h) if use_left else self.right(h)


dist.init_process_group("gloo")
torch.manual_seed(0)
net = DDP(TwoPath(), find_unused_parameters=True)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
g = torch.Generator().manual_seed(dist.get_rank() + 9)
for step in range(40):
    x = torch.randn(24, 8, generator=g)
    left = step % 3 != 0  # the same branch on both ranks in each step
    y = (x[:, 0] > 0).long() if left else (x[:, 1] > 0).long()
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(x, left), y)
    loss.backward()
    opt.step()
print(dist.get_rank(), loss.item())
dist.destroy_process_group()
