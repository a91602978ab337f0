# DDP with ZeroRedundancyOptimizer
# run: torchrun --standalone --nproc_per_node 2
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(4)],
                                torch.nn.Linear(16, 1)))
opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=3e-3)
rng = torch.Generator().manual_seed(31 * (rank + 1))
for step in range(30):
    x = torch.randn(32, 16, generator=rng)
    y = x[:, :4].sum(1, keepdim=True)
    loss = torch.nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(rank, loss.item(), sum(p.double().sum().item() for p in model.parameters()))
dist.destroy_process_group()
