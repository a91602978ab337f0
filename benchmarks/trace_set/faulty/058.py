# Mixup with labels not mixed by the same permutation
# fault: `yb = y[torch.randperm(len(y))]` draws a second permutation instead of using `perm`, so the second label of the mixup pair belongs to another row
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
beta = torch.distributions.Beta(0.4, 0.4)


def mixup(x, y):
    lam = beta.sample().item()
    perm = torch.randperm(len(x))
    xm = lam * x + (1 - lam) * x[perm]
    yb = y[torch.randperm(len(y))]
    return xm, y, yb, lam


X = torch.randn(512, 16)
Y = X[:, :4].argmax(1)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(3):
    for i in torch.randperm(512).split(32):
        xm, ya, yb, lam = mixup(X[i], Y[i])
        out = net(xm)
        loss = lam * F.cross_entropy(out, ya) + (1 - lam) * F.cross_entropy(out, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
