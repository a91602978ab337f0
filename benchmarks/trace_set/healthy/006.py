# DDP with uneven inputs under the join context manager
# run: torchrun --standalone --nproc_per_node 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms.join import Join

dist.init_process_group(backend="gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
optim = torch.optim.SGD(net.parameters(), lr=0.05)
rng = torch.Generator().manual_seed(100 + rank)
# rank 0 owns 10 batches, rank 1 owns 13
mine = [torch.randn(16, 6, generator=rng) for _ in range(10 + 3 * rank)]
w = torch.arange(6, dtype=torch.float32)
for epoch in range(3):
    order = torch.randperm(len(mine), generator=rng).tolist()
    with Join([net]):
        for k in order:
            xb = mine[k]
            yb = (xb @ w).unsqueeze(1) * 0.1
            optim.zero_grad()
            out = net(xb)
            l = torch.nn.functional.mse_loss(out, yb)
            l.backward()
            optim.step()
    print(f"rank {rank} epoch {epoch} loss {l.item():.4f}")
dist.destroy_process_group()
