# Pruning with a mask reapplied after each step
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
X = torch.randn(600, 16)
Y = X[:, :4].argmax(1)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
masks = {}


def prune(fraction):
    for n, p in net.named_parameters():
        if p.ndim == 2:
            k = int(fraction * p.numel())
            thr = p.detach().abs().flatten().kthvalue(max(1, k)).values
            masks[n] = (p.detach().abs() > thr).float()


@torch.no_grad()
def apply_masks():
    for n, p in net.named_parameters():
        if n in masks:
            p.mul_(masks[n])


for epoch, target in enumerate([0.0, 0.3, 0.5, 0.7]):
    if target:
        prune(target)
        apply_masks()
    for i in torch.randperm(600).split(60):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(X[i]), Y[i])
        loss.backward()
        opt.step()
        apply_masks()  # momentum would revive pruned weights
    zeros = sum((p == 0).sum().item() for p in net.parameters() if p.ndim == 2)
    print(epoch, loss.item(), "zeros", zeros)
