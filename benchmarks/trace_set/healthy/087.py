# Domain adversarial training with gradient reversal layer
import math
import torch
from torch import nn


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.lam * g, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.feat = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.label = nn.Linear(32, 2)
        self.domain = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x, lam):
        f = self.feat(x)
        return self.label(f), self.domain(Reverse.apply(f, lam))


torch.manual_seed(0)
net, ce = DANN(), nn.CrossEntropyLoss()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
STEPS = 50
for k in range(STEPS):
    lam = 2 / (1 + math.exp(-10 * k / STEPS)) - 1
    xs = torch.randn(32, 8)
    ys = (xs[:, 0] > 0).long()
    xt = torch.randn(32, 8) + 0.8  # unlabelled target domain
    ls, ds = net(xs, lam)
    _, dt = net(xt, lam)
    dom = ce(torch.cat([ds, dt]), torch.cat([torch.zeros(32), torch.ones(32)]).long())
    loss = ce(ls, ys) + dom
    opt.zero_grad()
    loss.backward()
    opt.step()
    if k % 10 == 0:
        print(k, round(lam, 2), loss.item())
