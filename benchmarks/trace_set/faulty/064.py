# Position embedding indexed by the batch dimension
# fault: `torch.arange(x.size(0))` numbers the rows of the batch, not the time steps, so each row gets one constant "position"
import torch
from torch import nn


class PosNet(nn.Module):
    def __init__(self, v=20, d=32, longest=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(v, d), nn.Embedding(longest, d)
        self.layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(d, v)

    def forward(self, x):
        p = torch.arange(x.size(0)).unsqueeze(1)
        return self.out(self.layer(self.tok(x) + self.pos(p)))


torch.manual_seed(0)
net = PosNet()
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
for step in range(50):
    x = torch.randint(0, 20, (16, 10))
    y = x.flip(1)  # output the sequence backwards: positions are needed
    loss = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
