# Param group built with a list comprehension that skips biases and norms
# fault: the groups take `p.ndim >= 2` with decay and `n.endswith("norm.weight")` without, so all biases (and LayerNorm biases) fall through and are in no group
import torch
from torch import nn


class Blk(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.fc = nn.Linear(d, d)

    def forward(self, x):
        return x + torch.relu(self.fc(self.norm(x)))


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 32), Blk(32), Blk(32), nn.Linear(32, 1))
named = list(net.named_parameters())
decay = [p for n, p in named if p.ndim >= 2]
no_decay = [p for n, p in named if n.endswith("norm.weight")]
opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=2e-3)
X = torch.randn(480, 10)
Y = X[:, :3].sum(1, keepdim=True) + 5.0
for epoch in range(4):
    for i in torch.randperm(480).split(48):
        loss = nn.functional.mse_loss(net(X[i]), Y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
