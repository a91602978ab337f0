# DDP: parameters changed after wrapping so the new head is not reduced
# run: torchrun --standalone --nproc_per_node 2
# fault: `ddp.module.head = nn.Linear(32, 4)` replaces the head after wrapping, so DDP has no hooks on it and its gradients (and seeds) differ per rank
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
ddp = DDP(Net(), find_unused_parameters=True)
ddp.module.head = nn.Linear(32, 4)
opt = torch.optim.Adam(ddp.parameters(), lr=5e-3)
for step in range(40):
    x = torch.randn(32, 8)
    y = x[:, :4].argmax(1)
    opt.zero_grad()
    loss = nn.functional.cross_entropy(ddp(x), y)
    loss.backward()
    opt.step()
print(rank, loss.item())
dist.destroy_process_group()
