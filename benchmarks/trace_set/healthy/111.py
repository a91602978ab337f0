# Reward model with Bradley-Terry pair loss
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class RewardModel(nn.Module):
    def __init__(self, v=30):
        super().__init__()
        self.emb = nn.Embedding(v, 16, padding_idx=0)
        self.rnn = nn.GRU(16, 24, batch_first=True)
        self.score = nn.Linear(24, 1)

    def forward(self, ids, lens):
        h, _ = self.rnn(self.emb(ids))
        last = h[torch.arange(len(ids)), lens - 1]  # last real token
        return self.score(last).squeeze(1)


def answers(n, T=10):
    lens = torch.randint(4, T + 1, (n,))
    ids = torch.randint(1, 30, (n, T)).masked_fill(torch.arange(T) >= lens[:, None], 0)
    quality = ((ids > 20).sum(1) - (ids.ne(0) & (ids < 8)).sum(1)).float()
    return ids, lens, quality


rm = RewardModel()
opt = torch.optim.AdamW(rm.parameters(), lr=5e-3)
for step in range(50):
    a, b = answers(32), answers(32)
    a_wins = (a[2] + 0.01 * torch.randn(32)) > b[2]
    ra, rb = rm(*a[:2]), rm(*b[:2])
    diff = torch.where(a_wins, ra - rb, rb - ra)
    loss = -F.logsigmoid(diff).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item(), (diff > 0).float().mean().item())
