# BYOL with predictor and EMA target, no negatives
import copy
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


def head(i, o):
    return nn.Sequential(nn.Linear(i, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, o))


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(head(16, 24), nn.ReLU(), head(24, 12))
        self.pred = head(12, 12)

    def forward(self, x):
        return self.pred(self.net(x))


online = Online()
target = copy.deepcopy(online.net).requires_grad_(False)  # BYOL: the target net's BN also runs in train mode
opt = torch.optim.Adam(online.parameters(), lr=2e-3)
data = torch.randn(640, 16)


def view(x):
    return x + 0.1 * torch.randn_like(x)


def sim_loss(p, z):
    return 2 - 2 * F.cosine_similarity(p, z, dim=-1).mean()


for epoch in range(2):
    for i in torch.randperm(640).split(64):
        v1, v2 = view(data[i]), view(data[i])
        with torch.no_grad():
            z1, z2 = target(v1), target(v2)
        loss = 0.5 * (sim_loss(online(v1), z2) + sim_loss(online(v2), z1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for t, o in zip(target.parameters(), online.net.parameters()):
                t.lerp_(o, 0.01)
    print(epoch, loss.item())
