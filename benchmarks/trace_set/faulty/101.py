# Batches come from a generator that is exhausted after the first epoch
# fault: `batches = (make(i) for i in ...)` is a generator: it is empty from the second epoch on, so epochs 2 to 6 do no step and print the old loss
import torch
from torch import nn

torch.manual_seed(0)
table = torch.randn(400, 6)
goal = table.abs().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
batches = ((table[i], goal[i]) for i in torch.randperm(400).split(40))
loss = torch.zeros(())
for epoch in range(6):
    net.train()
    for x, y in batches:
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        opt.step()
    print("epoch", epoch, "loss", loss.item())
