# Auxiliary loss detached with .item() inside the total
# fault: `loss = main + LAMBDA * aux.item()` makes the auxiliary loss a python number, so it gives no gradient and `self.aux_head` never trains
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
LAMBDA = 0.4


class DeepSup(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(14, 32), nn.ReLU())
        self.mid = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.aux_head = nn.Linear(32, 3)
        self.main_head = nn.Linear(32, 3)

    def forward(self, x):
        h = self.stem(x)
        return self.main_head(self.mid(h)), self.aux_head(h)


x = torch.randn(600, 14)
y = x[:, :3].argmax(1)
model = DeepSup()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for ep in range(2):
    for b in torch.randperm(600).split(30):
        o, a = model(x[b])
        main = F.cross_entropy(o, y[b])
        aux = F.cross_entropy(a, y[b])
        loss = main + LAMBDA * aux.item()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(ep, loss.item())
