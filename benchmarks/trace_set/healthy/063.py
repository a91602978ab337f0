# Two processes with manual all_reduce average of gradients, initial broadcast from rank 0
# run: torchrun --standalone --nproc_per_node 2
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(500 + rank)  # data differ by rank; weights come from rank 0
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
with torch.no_grad():
    for t in model.state_dict().values():
        dist.broadcast(t, src=0)
opt = torch.optim.Adam(model.parameters(), lr=5e-3)


def sync_grads():
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world
    o = 0
    for p in model.parameters():
        p.grad.copy_(flat[o:o + p.numel()].view_as(p))
        o += p.numel()


for step in range(40):
    x = torch.randn(32, 10)
    y = x[:, :2].prod(1, keepdim=True)
    opt.zero_grad()
    loss = nn.functional.huber_loss(model(x), y)
    loss.backward()
    sync_grads()
    opt.step()
print(rank, loss.item(), sum(p.sum().item() for p in model.parameters()))
dist.destroy_process_group()
