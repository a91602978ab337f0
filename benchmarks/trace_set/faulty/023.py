# Ranks start from different weights with manual gradient averaging
# run: torchrun --standalone --nproc_per_node 2
# fault: `torch.manual_seed(rank)` before the model is made and no broadcast of weights afterwards; gradients are averaged but the two replicas are different models
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)


def average_gradients(m):
    for p in m.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= world


for step in range(40):
    x = torch.randn(32, 10)
    y = x[:, :1] * x[:, 1:2]
    opt.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    average_gradients(model)
    opt.step()
print(rank, loss.item())
dist.destroy_process_group()
