# Quantisation-aware training with fake quant straight-through
import torch
from torch import nn


def fake_quant(w, bits=4):
    q = 2 ** (bits - 1) - 1
    s = w.detach().abs().amax().clamp_min(1e-8) / q
    wq = (w / s).round().clamp(-q, q) * s
    return w + (wq - w).detach()  # straight-through


class QLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, fake_quant(self.weight), self.bias)


torch.manual_seed(0)
x = torch.randn(500, 10)
y = (x[:, :5].sum(1) > x[:, 5:].sum(1)).long()
model = nn.Sequential(QLinear(10, 32), nn.ReLU(), QLinear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(4):
    for i in torch.randperm(400).split(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[i]), y[i])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        acc = (model(x[400:]).argmax(1) == y[400:]).float().mean().item()
    print(epoch, loss.item(), acc)
