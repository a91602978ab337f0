# F.normalize over the batch dimension in contrastive learning
# fault: `F.normalize(z, dim=0)` scales the columns over the batch instead of each row's vector (dim=1), so the similarities are no cosines
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 24))

    def forward(self, x):
        z = self.net(x)
        return F.normalize(z, dim=0)


f = Embedder()
opt = torch.optim.Adam(f.parameters(), lr=1e-3)
bank = torch.randn(640, 16)
for epoch in range(3):
    for i in torch.randperm(640).split(64):
        a = f(bank[i] + 0.1 * torch.randn(64, 16))
        b = f(bank[i] + 0.1 * torch.randn(64, 16))
        logits = a @ b.T / 0.1
        loss = F.cross_entropy(logits, torch.arange(64))
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
