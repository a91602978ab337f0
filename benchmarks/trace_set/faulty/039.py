# Causal mask never passed to the encoder
# fault: `self.enc(h)` is called without the causal mask, so each position sees the token it must predict
import torch
import torch.nn as nn

torch.manual_seed(0)
V, D, T = 32, 32, 16


class GPTish(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        lay = nn.TransformerEncoderLayer(D, 2, 64, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(lay, 2)
        self.head = nn.Linear(D, V)
        self.register_buffer("mask", torch.full((T, T), float("-inf")).triu(1))

    def forward(self, t):
        h = self.tok(t) + self.pos(torch.arange(t.size(1)))
        h = self.enc(h)
        return self.head(h)


model = GPTish()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(50):
    text = torch.randint(0, V, (16, T + 1))  # random text: nothing to learn but the leak
    logits = model(text[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
