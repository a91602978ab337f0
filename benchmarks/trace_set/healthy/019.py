# Frozen body kept in eval mode, new head trained
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def backbone():
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU())


class Transfer(nn.Module):
    def __init__(self, body, n_cls):
        super().__init__()
        self.body = body.requires_grad_(False)
        self.head = nn.Linear(32, n_cls)

    def train(self, mode=True):
        super().train(mode)
        self.body.eval()  # running statistics and dropout of the body stay fixed
        return self

    def forward(self, x):
        with torch.no_grad():
            z = self.body(x)
        return self.head(z)


torch.manual_seed(0)
x = torch.randn(500, 20)
y = (x @ torch.randn(20, 4)).argmax(1)
pre = backbone()
pre.train()
with torch.no_grad():
    for c in x.split(100):  # stands for pretraining: fills the running statistics
        pre(c)
model = Transfer(pre, 4)
train, val = TensorDataset(x[:400], y[:400]), TensorDataset(x[400:], y[400:])
opt = torch.optim.Adam(model.head.parameters(), lr=1e-2)
for epoch in range(4):
    model.train()
    for a, b in DataLoader(train, 40, shuffle=True):
        opt.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        good = sum((model(a).argmax(1) == b).sum().item() for a, b in DataLoader(val, 50))
    print(epoch, good / len(val))
