# Mixup with label smoothing done in the collate function
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate


class MixupCollate:
    def __init__(self, classes, alpha=0.3, smooth=0.1):
        self.c, self.s = classes, smooth
        self.dist = torch.distributions.Beta(alpha, alpha)

    def onehot(self, y):
        return F.one_hot(y, self.c).float() * (1 - self.s) + self.s / self.c

    def __call__(self, rows):
        x, y = default_collate(rows)
        t = self.onehot(y)
        lam, perm = self.dist.sample(), torch.randperm(len(x))
        return lam * x + (1 - lam) * x[perm], lam * t + (1 - lam) * t[perm]


torch.manual_seed(0)
x = torch.randn(600, 9)
y = x[:, :3].argmax(1)
train = DataLoader(TensorDataset(x[:500], y[:500]), 50, shuffle=True, collate_fn=MixupCollate(3))
val = DataLoader(TensorDataset(x[500:], y[500:]), 50)  # no mixup here
net = torch.nn.Sequential(torch.nn.Linear(9, 48), torch.nn.ReLU(), torch.nn.Linear(48, 3))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(4):
    for a, t in train:
        loss = F.cross_entropy(net(a), t)  # soft targets
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        print(epoch, loss.item(), sum((net(a).argmax(1) == b).sum().item() for a, b in val) / 100)
