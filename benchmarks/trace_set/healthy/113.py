# Recommender matrix factorisation with negative sampling and sparse gradients
import torch
from torch import nn
import torch.nn.functional as F


class MF(nn.Module):
    def __init__(self, users, items, d=12):
        super().__init__()
        self.u = nn.Embedding(users, d, sparse=True)
        self.i = nn.Embedding(items, d, sparse=True)
        nn.init.normal_(self.u.weight, std=0.1)
        nn.init.normal_(self.i.weight, std=0.1)

    def forward(self, u, i):
        return (self.u(u) * self.i(i)).sum(-1)


torch.manual_seed(0)
U, I = 60, 80
taste = torch.randn(U, 3) @ torch.randn(3, I)
pos = (taste > 2).nonzero()
seen = taste > 2
model = MF(U, I)
opt = torch.optim.SparseAdam(list(model.parameters()), lr=2e-2)
for epoch in range(3):
    for b in torch.randperm(len(pos)).split(64):
        u, i = pos[b].T
        j = torch.randint(0, I, (len(b),))
        for _ in range(5):  # draw again while the negative is a known positive
            bad = seen[u, j]
            j[bad] = torch.randint(0, I, (int(bad.sum()),))
        loss = -F.logsigmoid(model(u, i) - model(u, j)).mean()  # BPR
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
