# Packed sequences attend across documents
# fault: the packed row of several documents gets only the causal mask (`is_causal=True`) and running positions, so tokens attend to earlier unrelated documents
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
V, D, L, EOT = 33, 32, 40, 32


def packed_row():
    row = []
    while len(row) <= L:
        s, k, n = (int(torch.randint(lo, hi, ())) for lo, hi in ((0, 32), (1, 5), (4, 12)))
        row += [(s + k * j) % 32 for j in range(n)] + [EOT]
    return torch.tensor(row[: L + 1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.t, self.p, self.qkv, self.o = nn.Embedding(V, D), nn.Embedding(L, D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.ln, self.head = nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, ids):
        x = self.t(ids) + self.p.weight[: ids.size(1)]
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(self.ln(x))


net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
for step in range(40):
    ids = torch.stack([packed_row() for _ in range(8)])
    loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
