# Residual added in place with the detached value
# fault: in `Block.forward` the skip path is taken from `skip = x.data`, so no gradient flows through the residual connections
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))

    def forward(self, x):
        skip = x.data
        out = self.f(x)
        out += skip
        return out


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(12, 32), *[Block(32) for _ in range(5)], nn.Linear(32, 2))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
X = torch.randn(480, 12)
Y = (X[:, 0] * X[:, 1] > 0).long()
for epoch in range(4):
    for i in torch.randperm(480).split(40):
        loss = nn.functional.cross_entropy(net(X[i]), Y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
