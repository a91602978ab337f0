# Rank 1 never calls optimizer.step, its replica stays behind
# run: torchrun --standalone --nproc_per_node 2
# fault: `if rank == 0: opt.step()` updates the weights on rank 0 only; rank 1 keeps its initial weights for ever and its gradients are of another model
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(480, 9)
ds = TensorDataset(x, x.pow(2).mean(1, keepdim=True))
sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=20, sampler=sampler)
model = DDP(torch.nn.Sequential(torch.nn.Linear(9, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(model(a), b)
        loss.backward()
        if rank == 0:
            opt.step()
    print(rank, epoch, loss.item())
dist.destroy_process_group()
