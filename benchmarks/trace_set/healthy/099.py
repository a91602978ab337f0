# Hypernetwork that makes the weights of a target layer
import torch
from torch import nn
import torch.nn.functional as F


class HyperLinear(nn.Module):
    """weights of a 4->3 layer are made from a context vector"""

    def __init__(self, ctx, i, o):
        super().__init__()
        self.i, self.o = i, o
        self.gen = nn.Sequential(nn.Linear(ctx, 32), nn.ReLU(), nn.Linear(32, i * o + o))

    def forward(self, x, c):
        w = self.gen(c)
        W = w[:, : self.i * self.o].view(-1, self.o, self.i)
        b = w[:, self.i * self.o:]
        return torch.einsum("boi,bni->bno", W, x) + b[:, None]


torch.manual_seed(0)
net = HyperLinear(2, 4, 3)
basis = torch.randn(2, 3, 4)
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(60):
    c = torch.randn(16, 2)
    x = torch.randn(16, 10, 4)
    target = torch.einsum("bk,koi,bni->bno", c, basis, x)
    loss = F.mse_loss(net(x, c), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 15 == 0:
        print(step, loss.item())
