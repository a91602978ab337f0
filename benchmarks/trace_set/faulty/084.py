# Layers unfrozen after the optimizer was built from the trainable parameters
# fault: `opt` was built from `filter(requires_grad)` while the body was frozen; `model.body.requires_grad_(True)` in epoch 2 gives gradients but the optimizer never steps these parameters
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        return self.head(self.body(x))


torch.manual_seed(0)
model = Model()
model.body.requires_grad_(False)
opt = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=5e-3)
X = torch.randn(480, 10)
Y = (X[:, :4] * X[:, 4:8]).argmax(1)
for epoch in range(5):
    if epoch == 2:
        model.body.requires_grad_(True)  # second stage: fine-tune everything
        for g in opt.param_groups:
            g["lr"] = 1e-3
    for i in torch.randperm(480).split(48):
        loss = nn.functional.cross_entropy(model(X[i]), Y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
