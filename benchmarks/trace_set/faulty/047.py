# BatchNorm buffers not in EMA copy
# fault: `ema_step` copies `parameters()` only; the BatchNorm running_mean/var buffers of the EMA model stay at their initial 0 and 1
import copy
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
ema_model = copy.deepcopy(model)
ema_model.eval()


def ema_step(beta=0.9):
    for p_ema, p in zip(ema_model.parameters(), model.parameters()):
        p_ema.data.mul_(beta).add_(p.data, alpha=1 - beta)


X = torch.randn(600, 8) * 4 + 3
Y = X[:, :3].argmax(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(4):
    model.train()
    for idx in torch.randperm(500).split(50):
        loss = nn.functional.cross_entropy(model(X[idx]), Y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema_step()
    with torch.no_grad():
        print(epoch, (ema_model(X[500:]).argmax(1) == Y[500:]).float().mean().item())
