# drop_last in validation drops the rare class
# fault: the validation loader has `drop_last=True`, and since the rows are sorted by class the dropped tail of 30 is the whole rare class
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data(n0, n1, n2, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.cat([torch.full((n,), c) for c, n in enumerate((n0, n1, n2))])
    return TensorDataset(torch.randn(len(y), 6, generator=g) + nn.functional.one_hot(y, 6) * 1.5, y)


torch.manual_seed(0)
common = dict(batch_size=50, drop_last=True)
train = DataLoader(data(300, 200, 50, 0), shuffle=True, **common)
val = DataLoader(data(60, 40, 30, 1), **common)
net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(4):
    for x, y in train:
        opt.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        opt.step()
    hit = n = 0
    with torch.no_grad():
        for x, y in val:
            hit += (net(x).argmax(1) == y).sum().item()
            n += len(y)
    print(epoch, "val acc", hit / n)
