# BatchNorm momentum 0.99 ported from Keras
# fault: `nn.BatchNorm1d(..., momentum=0.99)` was copied from Keras; in PyTorch it means that the running statistics are almost those of the last batch alone
import torch
from torch import nn


def dense(i, o):
    return [nn.Linear(i, o), nn.BatchNorm1d(o, momentum=0.99, eps=1e-3), nn.ReLU()]


torch.manual_seed(0)
net = nn.Sequential(*dense(10, 32), *dense(32, 32), nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
X = torch.randn(508, 10) * torch.rand(508, 1) * 4
Y = X[:, :3].argmax(1)
for epoch in range(2):
    net.train()
    for i in torch.randperm(408).split(8):  # memory allows 8 only
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(X[i]), Y[i])
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        print(epoch, loss.item(), nn.functional.cross_entropy(net(X[408:]), Y[408:]).item())
