# DDP with broadcast_buffers=False: evaluation and checkpoint on a rank with its own BN statistics
# run: torchrun --standalone --nproc_per_node 2
# fault: `DDP(net, broadcast_buffers=False)` with plain BatchNorm lets each rank keep running statistics of its own shard; evaluation and the checkpoint on rank 0 know the statistics of rank 0's data only
import io
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
model = DDP(net, broadcast_buffers=False)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
g = torch.Generator().manual_seed(rank)
shift = 3.0 * rank  # each rank reads another hospital's data
for step in range(40):
    model.train()
    x = torch.randn(32, 6, generator=g) + shift
    y = (x[:, 0] > shift).long()
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
if rank == 0:
    torch.save(net.state_dict(), io.BytesIO())
net.eval()
with torch.no_grad():
    vx = torch.cat([torch.randn(64, 6), torch.randn(64, 6) + 3])
    vy = torch.cat([vx[:64, 0] > 0, vx[64:, 0] > 3]).long()
    print(rank, (net(vx).argmax(1) == vy).float().mean().item())
dist.destroy_process_group()
