# Packed sequences with block diagonal causal mask and boundary targets ignored
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
V, D, LEN = 32, 32, 48


def pack():
    ids, doc, pos = [], [], []
    d = 0
    while len(ids) < LEN + 1:
        n = int(torch.randint(5, 15, ()))
        s, k = int(torch.randint(0, V, ())), int(torch.randint(1, 4, ()))
        ids += [(s + k * j) % V for j in range(n)]
        doc += [d] * n
        pos += list(range(n))
        d += 1
    return [torch.tensor(z[:LEN + 1]) for z in (ids, doc, pos)]


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.te, self.pe = nn.Embedding(V, D), nn.Embedding(16, D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.ff = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))
        self.n1, self.n2, self.head = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, ids, doc, pos):
        B, L = ids.shape
        x = self.te(ids) + self.pe(pos)
        same = doc[:, :, None] == doc[:, None, :]
        causal = torch.ones(L, L, dtype=torch.bool).tril()
        q, k, v = (t.view(B, L, 2, D // 2).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=(same & causal)[:, None])
        x = x + self.o(a.transpose(1, 2).reshape(B, L, D))
        return self.head(self.n2(x + self.ff(x)))


net = Packed()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
for step in range(30):
    ids, doc, pos = (torch.stack(t) for t in zip(*[pack() for _ in range(8)]))
    target = ids[:, 1:].clone()
    target[doc[:, 1:] != doc[:, :-1]] = -100  # first token of the next document can't be predicted
    logits = net(ids[:, :-1], doc[:, :-1], pos[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
