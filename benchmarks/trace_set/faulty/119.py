# Embedding padding_idx set to a real token's id
# fault: `nn.Embedding(V, 16, padding_idx=5)` uses the id of a real word as padding index (the vocabulary was rebuilt), so that word's vector is zero and never trained
import torch
from torch import nn

torch.manual_seed(0)
V = 30
words = ["<pad>"] + [f"w{i}" for i in range(1, V)]
stoi = {w: i for i, w in enumerate(words)}


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, 16, padding_idx=5)
        self.out = nn.Linear(16, 2)

    def forward(self, t):
        return self.out(self.emb(t).mean(1))


net = Bag()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(50):
    t = torch.randint(1, V, (32, 8))
    t[:, 6:] = stoi["<pad>"]
    y = (t == stoi["w5"]).any(1).long()
    loss = nn.functional.cross_entropy(net(t), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
