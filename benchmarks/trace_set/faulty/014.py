# Validation with dropout and BatchNorm in train mode updates running statistics
# fault: `validate` uses no_grad but has no `model.eval()`, so the validation batches change the BatchNorm running statistics and dropout is on
import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))

    def forward(self, x):
        return self.f(x).squeeze(-1)


def validate(model, vx, vy):
    with torch.no_grad():
        se = 0.0
        for i in range(0, len(vx), 25):
            se += ((model(vx[i:i + 25]) - vy[i:i + 25]) ** 2).sum().item()
    return se / len(vx)


torch.manual_seed(0)
X = torch.randn(500, 10)
Y = X[:, 0] * 2 - X[:, 3]
tx, ty, vx, vy = X[:400], Y[:400], X[400:] + 1.0, Y[400:] + 1.0
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for e in range(4):
    net.train()
    for b in torch.randperm(400).split(40):
        opt.zero_grad()
        ((net(tx[b]) - ty[b]) ** 2).mean().backward()
        opt.step()
    print(e, validate(net, vx, vy))
