# DDP with no_sync on all but the last micro batch
# run: torchrun --standalone --nproc_per_node 2
import contextlib
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACC = 4
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(1024, 8)
ds = TensorDataset(x, x[:, :4].argmax(1))
sampler = DistributedSampler(ds, drop_last=True)
loader = DataLoader(ds, batch_size=16, sampler=sampler, drop_last=True)  # 32 micro batches a rank
assert len(loader) % ACC == 0
model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)))
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        last = (i + 1) % ACC == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = torch.nn.functional.cross_entropy(model(a), b) / ACC
            loss.backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
    if dist.get_rank() == 0:
        print(epoch, loss.item() * ACC)
dist.destroy_process_group()
