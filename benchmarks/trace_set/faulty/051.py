# Frozen backbone BatchNorm still updates running stats
# fault: `model.train()` in the epoch loop puts the frozen backbone's BatchNorm in train mode too, so its running statistics drift although the weights are frozen
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
backbone = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
with torch.no_grad():
    for _ in range(20):
        backbone(torch.randn(32, 1, 8, 8))
for p in backbone.parameters():
    p.requires_grad = False
model = nn.Sequential(backbone, nn.Linear(32, 3))
y = torch.randint(0, 3, (300,))
x = torch.randn(300, 1, 8, 8) * (1 + y.float())[:, None, None, None] + 2
opt = torch.optim.Adam(model[1].parameters(), lr=1e-2)
for epoch in range(3):
    model.train()
    for a, b in DataLoader(TensorDataset(x[:240], y[:240]), 30, shuffle=True):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        print(epoch, (model(x[240:]).argmax(1) == y[240:]).float().mean().item())
