# Gradual unfreezing with add_param_group
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential()
for i, (a, b) in enumerate([(12, 32), (32, 32), (32, 32)]):
    model.add_module(f"stage{i}", nn.Sequential(nn.Linear(a, b), nn.ReLU()))
model.add_module("head", nn.Linear(32, 4))
for n, p in model.named_parameters():
    p.requires_grad = n.startswith("head")
opt = torch.optim.AdamW(model.head.parameters(), lr=5e-3)
to_open = ["stage2", "stage1", "stage0"]
X = torch.randn(480, 12)
Y = (X[:, :4] ** 2).argmax(1)
for epoch in range(6):
    if epoch and epoch % 2 == 0 and to_open:
        part = getattr(model, to_open.pop(0))
        part.requires_grad_(True)
        opt.add_param_group({"params": list(part.parameters()), "lr": 1e-3})
    for i in torch.randperm(480).split(60):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(X[i]), Y[i])
        loss.backward()
        opt.step()
    print(epoch, len(opt.param_groups), loss.item())
