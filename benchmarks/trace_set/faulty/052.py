# Gradient checkpointing with reentrant variant and inputs without grad: body gets no gradient
# fault: `checkpoint(block, h, use_reentrant=True)` gets `h` from a frozen embedding (no requires_grad), so the reentrant checkpoint returns outputs without a graph and no block gets a gradient (only a warning, which is filtered)
import warnings
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore")
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self, v=30, d=24):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.emb.weight.requires_grad = False
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d)) for _ in range(2))
        self.head = nn.Linear(d, 4)

    def forward(self, t):
        h = self.emb(t)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return self.head(h.mean(1))


net = Net()
opt = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=3e-3)
for step in range(40):
    t = torch.randint(0, 30, (32, 6))
    y = (t < 10).sum(1).clamp(max=3)
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(t), y)
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
