# Optimizer made before the last layer was replaced
# fault: `model[-1] = nn.Linear(64, 3)` comes after `optimizer = ...Adam(model.parameters())`, so the new last layer is in no optimizer
import torch
from torch import nn


def build_pretrained():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1000))


torch.manual_seed(0)
model = build_pretrained()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model[-1] = nn.Linear(64, 3)  # our task has three classes
data = torch.randn(512, 8)
target = data[:, :3].argmax(1)
for epoch in range(3):
    for chunk in torch.randperm(512).chunk(16):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[chunk]), target[chunk])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
