# Stochastic depth residual network with eval scaling
import torch
from torch import nn


class StochasticDepth(nn.Module):
    def __init__(self, d, survive):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU(), nn.Linear(d, d))
        self.p = survive

    def forward(self, x):
        if self.training:
            keep = (torch.rand(len(x), 1) < self.p).float()
            return x + keep * self.f(x)
        return x + self.p * self.f(x)


torch.manual_seed(0)
D, N = 24, 4
net = nn.Sequential(nn.Linear(8, D), *[StochasticDepth(D, 1 - 0.5 * k / N) for k in range(1, N + 1)], nn.Linear(D, 4))
opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
X = torch.randn(500, 8)
Y = X[:, :4].argmax(1)
for epoch in range(4):
    net.train()
    for i in torch.randperm(400).split(40):
        loss = nn.functional.cross_entropy(net(X[i]), Y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        print(epoch, loss.item(), (net(X[400:]).argmax(1) == Y[400:]).float().mean().item())
