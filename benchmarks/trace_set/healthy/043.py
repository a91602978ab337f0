# Char RNN with hidden state detached between truncated windows
import torch
from torch import nn

torch.manual_seed(0)
text = "the quick brown fox jumps over the lazy dog. " * 60
chars = sorted(set(text))
ids = torch.tensor([chars.index(c) for c in text])
B, W = 8, 15
n = (len(ids) - 1) // B
inp = ids[: n * B].view(B, n)
tgt = ids[1: n * B + 1].view(B, n)


class CharRNN(nn.Module):
    def __init__(self, v, h=48):
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(v, 16), nn.LSTM(16, h, batch_first=True), nn.Linear(h, v)

    def forward(self, x, state):
        y, state = self.r(self.e(x), state)
        return self.o(y), state


net = CharRNN(len(chars))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(2):
    state = None  # the stream begins again
    for k in range(0, n - W + 1, W):
        logits, state = net(inp[:, k:k + W], state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tgt[:, k:k + W].flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
    print(epoch, loss.item())
