# FSDP2 fully_shard on a small transformer, each rank its own data
# run: torchrun --standalone --nproc_per_node 2
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = nn.MultiheadAttention(d, 2, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x, mask):
        h = self.ln1(x)
        x = x + self.att(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ff(self.ln2(x))


class LM(nn.Module):
    def __init__(self, v=32, d=32, n=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(v, d), nn.Embedding(16, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(n))
        self.out = nn.Linear(d, v)

    def forward(self, t):
        L = t.shape[1]
        m = torch.ones(L, L, dtype=torch.bool).triu(1)
        x = self.tok(t) + self.pos(torch.arange(L))
        for b in self.blocks:
            x = b(x, m)
        return self.out(x)


model = LM()
for b in model.blocks:
    fully_shard(b, mesh=mesh)
fully_shard(model, mesh=mesh)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
data_rng = torch.Generator().manual_seed(rank)
for step in range(20):
    start = torch.randint(0, 32, (8, 1), generator=data_rng)
    seq = (start + torch.arange(17) * 3) % 32
    logits = model(seq[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), seq[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0 and step % 5 == 0:
        print(step, loss.item())
dist.destroy_process_group()
