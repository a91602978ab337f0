# Normalising flow (RealNVP) maximum likelihood
import math
import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        out = torch.cat([b, a] if self.flip else [a, b], 1)
        return out, s.squeeze(1)


class Flow(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.steps = nn.ModuleList(Coupling(i % 2 == 1) for i in range(n))

    def log_prob(self, x):
        ld = torch.zeros(len(x))
        for s in self.steps:
            x, d = s(x)
            ld = ld + d
        return -0.5 * x.pow(2).sum(1) - math.log(2 * math.pi) + ld


torch.manual_seed(0)
flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=5e-3)
for it in range(60):
    t = torch.randn(128, 1)
    x = torch.cat([t, t ** 2 * 0.5 + 0.2 * torch.randn(128, 1)], 1)
    nll = -flow.log_prob(x).mean()
    opt.zero_grad()
    nll.backward()
    opt.step()
    if it % 15 == 0:
        print(it, nll.item())
