# CTC on generated digit sequences with input and target lengths
import torch
from torch import nn

torch.manual_seed(0)
GLYPH = torch.randn(6, 10)  # class 0 is the blank, so glyphs 1..5 are used


def sample(n):
    xs, ys = [], []
    for _ in range(n):
        y = torch.randint(1, 6, (int(torch.randint(2, 6, ())),))
        frames = torch.cat([GLYPH[c].repeat(int(torch.randint(3, 5, ())), 1) for c in y])
        xs.append(frames + 0.3 * torch.randn_like(frames))
        ys.append(y)
    il = torch.tensor([len(x) for x in xs])
    tl = torch.tensor([len(y) for y in ys])
    return nn.utils.rnn.pad_sequence(xs), torch.cat(ys), il, tl


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(10, 32, bidirectional=True), nn.Linear(64, 6)

    def forward(self, x, il):
        p = nn.utils.rnn.pack_padded_sequence(x, il, enforce_sorted=False)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(p)[0])
        return self.fc(h).log_softmax(-1)


net, ctc = Net(), nn.CTCLoss(blank=0, zero_infinity=True)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(40):
    x, y, il, tl = sample(16)
    loss = ctc(net(x, il), y, il, tl)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
