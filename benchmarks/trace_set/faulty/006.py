# Token-weighted loss averaged per micro batch with unequal token counts
# fault: `loss = F.cross_entropy(..., ignore_index=-100) / ACCUM` averages each micro batch over its own number of tokens, so tokens of short micro batches weigh more than in one big batch
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(2)
ACCUM, V = 4, 40


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(V, 32)
        self.r = nn.GRU(32, 32, batch_first=True)
        self.o = nn.Linear(32, V)

    def forward(self, t):
        return self.o(self.r(self.e(t))[0])


def micro_batch():
    # lengths are very uneven: 2 to 24 tokens
    lens = torch.randint(2, 25, (1,)).item() * torch.ones(6, dtype=torch.long)
    T = int(lens.max()) + 1
    toks = (torch.randint(0, V, (6, 1)) + torch.arange(T)) % V
    labels = toks[:, 1:].clone()
    labels[torch.rand_like(labels, dtype=torch.float) < 0.2] = -100
    return toks[:, :-1], labels


m = TinyLM()
opt = torch.optim.AdamW(m.parameters(), lr=3e-3)
for step in range(25):
    opt.zero_grad()
    for _ in range(ACCUM):
        t, l = micro_batch()
        loss = F.cross_entropy(m(t).transpose(1, 2), l, ignore_index=-100) / ACCUM
        loss.backward()
    nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    opt.step()
    if step % 8 == 0:
        print(step, loss.item() * ACCUM)
