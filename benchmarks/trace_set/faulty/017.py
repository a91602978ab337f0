# Head frozen by a name match that is too wide
# fault: `if "enc" in n` was meant for `encoder.*` but also matches `sequence_head.*`, so the new head is frozen as well and only `norm` trains
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16))
        self.norm = nn.LayerNorm(16)
        self.sequence_head = nn.Linear(16, 4)

    def forward(self, x):
        return self.sequence_head(self.norm(self.encoder(x)))


torch.manual_seed(0)
m = Model()
for n, p in m.named_parameters():
    if "enc" in n:
        p.requires_grad = False
opt = torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=1e-2)
X = torch.randn(400, 10)
Y = X[:, :4].argmax(1)
for epoch in range(3):
    for i in torch.randperm(400).split(40):
        loss = nn.functional.cross_entropy(m(X[i]), Y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
