# Ranking with listwise softmax over variable-size groups with mask
import torch
from torch import nn

torch.manual_seed(0)
scorer = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
w = torch.randn(6)


def queries(n, most=12):
    size = torch.randint(3, most + 1, (n,))
    x = torch.randn(n, most, 6)
    mask = torch.arange(most) < size[:, None]
    rel = (x @ w).masked_fill(~mask, 0).relu()
    return x * mask[..., None], rel, mask


def listnet(s, rel, mask):
    neg = torch.finfo(s.dtype).min
    logp = s.masked_fill(~mask, neg).log_softmax(1)
    target = rel.masked_fill(~mask, neg).softmax(1)
    return -(target * logp.masked_fill(~mask, 0)).sum(1).mean()


opt = torch.optim.Adam(scorer.parameters(), lr=5e-3)
data = queries(320)
for epoch in range(4):
    for b in torch.randperm(320).split(32):
        x, rel, mask = (d[b] for d in data)
        loss = listnet(scorer(x).squeeze(-1), rel, mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
