# Masked LM with 80/10/10 corruption and ignore index elsewhere
import torch
import torch.nn as nn

torch.manual_seed(0)
MASK, FIRST, VOCAB, L = 1, 2, 34, 16


def make(n):
    return (torch.randint(0, 32, (n, 1)) + torch.arange(L)) % 32 + FIRST


def corrupt(tokens, p=0.2):
    labels = tokens.clone()
    chosen = torch.rand(tokens.shape) < p
    chosen[:, 0] |= ~chosen.any(1)
    labels[~chosen] = -100
    inputs = tokens.clone()
    r = torch.rand(tokens.shape)
    inputs[chosen & (r < 0.8)] = MASK
    swap = chosen & (r >= 0.8) & (r < 0.9)
    inputs[swap] = torch.randint(FIRST, VOCAB, (int(swap.sum()),))
    return inputs, labels


class Encoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(L, d)
        lay = nn.TransformerEncoderLayer(d, 2, 64, 0.1, batch_first=True)
        self.enc = nn.TransformerEncoder(lay, 2)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, t):
        return self.out(self.enc(self.tok(t) + self.pos.weight))


data, held = make(320), make(32)
net = Encoder()
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
for ep in range(2):
    net.train()
    for b in torch.randperm(len(data)).split(32):
        i, l = corrupt(data[b])
        loss = nn.functional.cross_entropy(net(i).flatten(0, 1), l.flatten(), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        i, l = corrupt(held)
        v = nn.functional.cross_entropy(net(i).flatten(0, 1), l.flatten(), ignore_index=-100)
    print(ep, loss.item(), v.item())
