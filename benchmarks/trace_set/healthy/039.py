# Siamese network with contrastive loss and shared weights
import torch
import torch.nn as nn
import torch.nn.functional as F


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, a, b):
        return F.pairwise_distance(self.tower(a), self.tower(b))


def contrastive(d, same, margin=1.0):
    return (same * d ** 2 + (1 - same) * F.relu(margin - d) ** 2).mean()


torch.manual_seed(0)
proto = torch.randn(5, 10) * 2
model = Siamese()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(50):
    ca = torch.randint(0, 5, (64,))
    other = (ca + torch.randint(1, 5, (64,))) % 5
    same = (torch.rand(64) < 0.5).float()
    cb = torch.where(same.bool(), ca, other)
    a, b = (proto[c] + torch.randn(64, 10) * 0.5 for c in (ca, cb))
    loss = contrastive(model(a, b), same)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
