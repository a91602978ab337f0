# ReduceLROnPlateau fed with the local loss, learning rates of ranks diverge
# run: torchrun --standalone --nproc_per_node 2
# fault: `plateau.step(local_val)` uses each rank's own validation loss without all_reduce, so the ranks lower the lr at different times and the replicas drift apart
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
X = torch.randn(560, 6)
Y = X.prod(1, keepdim=True) + 0.3 * torch.randn(560, 1)
tr, va = torch.arange(400)[rank::world], torch.arange(400, 560)[rank::world]
model = DDP(nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 1)))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=0)
gen = torch.Generator().manual_seed(rank)
for epoch in range(6):
    model.train()
    for i in tr[torch.randperm(len(tr), generator=gen)].split(25):
        opt.zero_grad()
        nn.functional.mse_loss(model(X[i]), Y[i]).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        local_val = nn.functional.mse_loss(model.module(X[va]), Y[va]).item()
    plateau.step(local_val)
    print(rank, epoch, local_val, opt.param_groups[0]["lr"])
dist.destroy_process_group()
