# Energy-based model with Langevin samples from a persistent buffer
import torch
from torch import nn

torch.manual_seed(0)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.f(x).squeeze(1)


E = Energy()
opt = torch.optim.Adam(E.parameters(), lr=1e-3, betas=(0.0, 0.999))
buffer = torch.randn(1000, 2)


def langevin(x, steps=10, eps=0.05):
    for p in E.parameters():
        p.requires_grad_(False)
    x = x.clone().requires_grad_(True)
    for _ in range(steps):
        (g,) = torch.autograd.grad(E(x).sum(), x)
        x = (x - eps * g + (2 * eps) ** 0.5 * torch.randn_like(x)).detach().requires_grad_(True)
    for p in E.parameters():
        p.requires_grad_(True)
    return x.detach()


for it in range(30):
    k = torch.randint(0, 4, (64,))
    angle = k * torch.pi / 2
    pos = torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.2 * torch.randn(64, 2)
    idx = torch.randperm(1000)[:64]
    init = buffer[idx]
    fresh = torch.rand(64) < 0.05
    init[fresh] = torch.randn(int(fresh.sum()), 2)
    neg = langevin(init)
    buffer[idx] = neg
    ep, en = E(pos), E(neg)
    loss = ep.mean() - en.mean() + 0.1 * (ep.pow(2) + en.pow(2)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 10 == 0:
        print(it, loss.item())
