# SimCLR NT-Xent with two views, small temperature
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32))
projector = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
opt = torch.optim.AdamW([*encoder.parameters(), *projector.parameters()], lr=2e-3)
pool = torch.randn(512, 20)


def nt_xent(z1, z2, tau=0.2):
    n = z1.size(0)
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    sim = z @ z.T / tau
    sim.fill_diagonal_(float("-inf"))
    partner = torch.arange(2 * n).roll(n)
    return F.cross_entropy(sim, partner)


def aug(x):
    keep = (torch.rand_like(x) > 0.2).float()
    return x * keep + 0.1 * torch.randn_like(x)


for ep in range(3):
    for i in torch.randperm(512).split(64):
        x = pool[i]
        loss = nt_xent(projector(encoder(aug(x))), projector(encoder(aug(x))))
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(ep, loss.item())
