# load_state_dict(assign=True) unties tied weights
# fault: `lm.load_state_dict(sd, assign=True)` puts two separate tensors into `emb.weight` and `out.weight`, so the tie made in __init__ is gone
import io
import torch
from torch import nn


class LM(nn.Module):
    def __init__(self, v=40, d=24):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, v, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, t):
        return self.out(self.rnn(self.emb(t))[0])


torch.manual_seed(0)
f = io.BytesIO()
torch.save({k: v.clone() for k, v in LM().state_dict().items()}, f)
f.seek(0)
lm = LM()
sd = torch.load(f)
lm.load_state_dict(sd, assign=True)
opt = torch.optim.AdamW(lm.parameters(), lr=5e-3)
for step in range(40):
    s = (torch.randint(0, 40, (16, 1)) + 3 * torch.arange(16)) % 40
    loss = nn.functional.cross_entropy(lm(s[:, :-1]).flatten(0, 1), s[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
