# no_sync on every micro batch, the last too
# run: torchrun --standalone --nproc_per_node 2
# fault: `sync = (i % ACC == ACC)` is never true, so every micro batch runs in no_sync and gradients are never reduced over the ranks
import contextlib
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
ACC = 4
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)))
opt = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
g = torch.Generator().manual_seed(50 + dist.get_rank())
for i in range(48):
    x = torch.randn(16, 8, generator=g)
    y = x[:, :3].argmax(1)
    sync = (i % ACC == ACC)
    with contextlib.nullcontext() if sync else ddp.no_sync():
        loss = torch.nn.functional.cross_entropy(ddp(x), y) / ACC
        loss.backward()
    if i % ACC == ACC - 1:
        opt.step()
        opt.zero_grad()
print(dist.get_rank(), loss.item() * ACC)
dist.destroy_process_group()
