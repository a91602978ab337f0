# Lookahead wrapper with slow weights over SGD
import torch
from torch import nn


class Lookahead:
    def __init__(self, opt, k=5, alpha=0.5):
        self.opt, self.k, self.alpha, self.n = opt, k, alpha, 0
        self.slow = {p: p.detach().clone() for g in opt.param_groups for p in g["params"]}

    def zero_grad(self):
        self.opt.zero_grad()

    @torch.no_grad()
    def step(self):
        self.opt.step()
        self.n += 1
        if self.n % self.k == 0:
            for p, s in self.slow.items():
                s.add_(p - s, alpha=self.alpha)
                p.copy_(s)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 1))
opt = Lookahead(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
for step in range(60):
    x = torch.randn(64, 7)
    loss = (model(x).squeeze(1) - x.abs().sum(1) / 7).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 15 == 0:
        print(step, loss.item())
