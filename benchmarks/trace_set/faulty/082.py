# Weights re-initialised as new Parameters after the optimizer was built
# fault: `init_weights` assigns `m.weight = nn.Parameter(...)` after `opt` was built, so the optimizer holds the old tensors and only the biases train
import torch
from torch import nn


def init_weights(net):
    for m in net.modules():
        if isinstance(m, nn.Linear):
            m.weight = nn.Parameter(torch.randn_like(m.weight) * (2 / m.in_features) ** 0.5)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
init_weights(net)
x = torch.randn(500, 10)
y = (x[:, 0] > x[:, 1]).long()
for epoch in range(4):
    for b in torch.randperm(500).split(50):
        loss = nn.functional.cross_entropy(net(x[b]), y[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
