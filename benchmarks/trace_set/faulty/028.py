# Per-rank token mean averaged by DDP over ranks with very unequal token counts
# run: torchrun --standalone --nproc_per_node 2
# fault: `loss = ce.sum() / n_tok` divides by the local token count and DDP then averages over the ranks, so tokens of the rank with few tokens weigh several times more
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
V = 30


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(V, 24), nn.GRU(24, 24, batch_first=True), nn.Linear(24, V)

    def forward(self, t):
        return self.o(self.r(self.e(t))[0])


model = DDP(M())
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
g = torch.Generator().manual_seed(rank)
for step in range(30):
    T = 5 if rank == 0 else 40  # rank 0 holds the chat data, rank 1 the books
    t = (torch.randint(0, V, (8, 1), generator=g) + torch.arange(T + 1) * (1 + rank)) % V
    mask = torch.rand(8, T, generator=g) < (0.3 if rank == 0 else 1.0)
    mask[0, 0] = True
    ce = F.cross_entropy(model(t[:, :-1]).transpose(1, 2), t[:, 1:], reduction="none") * mask
    n_tok = mask.sum()
    loss = ce.sum() / n_tok
    opt.zero_grad()
    loss.backward()
    opt.step()
print(rank, loss.item())
dist.destroy_process_group()
