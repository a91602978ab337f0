# Skipped steps on non-finite loss with zero_grad before the next batch
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
x = torch.randn(500, 5)
x[torch.randint(0, 500, (3,)), 0] = float("inf")  # a few broken sensor rows
y = torch.nan_to_num(x, posinf=0.0)[:, 1:].sum(1, keepdim=True)
skipped = 0
for epoch in range(3):
    for i in torch.randperm(500).split(25):
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(x[i]), y[i])
        if not torch.isfinite(loss):
            skipped += 1
            continue
        loss.backward()
        opt.step()
    print(epoch, loss.item() if torch.isfinite(loss) else "skipped", "skipped so far", skipped)
assert skipped < 12
