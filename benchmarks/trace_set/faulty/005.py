# Accumulated loss not divided by number of micro batches
# fault: `loss.backward()` uses the full micro batch mean, not divided by `accum`, so the gradient is 8 times too large
import argparse
import torch
from torch.utils.data import DataLoader, TensorDataset

cfg = argparse.Namespace(lr=0.05, accum=8, epochs=4, bs=8)
torch.manual_seed(0)
x = torch.randn(512, 10)
y = torch.randint(0, 3, (512,))
x[:, 0] += y
loader = DataLoader(TensorDataset(x, y), batch_size=cfg.bs, shuffle=True)
net = torch.nn.Linear(10, 3)
opt = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9)
accum = cfg.accum
for ep in range(cfg.epochs):
    opt.zero_grad()
    for i, (a, b) in enumerate(loader, 1):
        loss = torch.nn.functional.cross_entropy(net(a), b)
        loss.backward()
        if i % accum == 0:
            opt.step()
            opt.zero_grad()
    print(ep, loss.item())
