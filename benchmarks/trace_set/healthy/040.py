# DDPM noise prediction on 2-d points
import math
import torch
from torch import nn

torch.manual_seed(0)
T = 50
betas = torch.linspace(1e-3, 0.1, T)
abar = torch.cumprod(1 - betas, 0)


def moons(n):
    a = torch.rand(n) * math.pi
    s = (torch.rand(n) < 0.5).float()
    x = torch.stack([a.cos() + s, (1 - 2 * s) * a.sin() + 0.5 * s], 1)
    return x + 0.05 * torch.randn(n, 2)


class Eps(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(T, 16)
        self.net = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.t(t)], 1))


model = Eps()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for it in range(60):
    x0 = moons(128)
    t = torch.randint(0, T, (128,))
    eps = torch.randn_like(x0)
    a = abar[t].unsqueeze(1)
    xt = a.sqrt() * x0 + (1 - a).sqrt() * eps
    loss = (model(xt, t) - eps).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

with torch.no_grad():
    x = torch.randn(64, 2)
    for k in reversed(range(T)):
        e = model(x, torch.full((64,), k))
        x = (x - betas[k] / (1 - abar[k]).sqrt() * e) / (1 - betas[k]).sqrt()
        if k:
            x = x + betas[k].sqrt() * torch.randn_like(x)
print("loss", loss.item(), "sample mean", x.mean(0).tolist())
