# TransformerEncoderLayer without batch_first attends over the batch
# fault: `nn.TransformerEncoderLayer(D, 2, 48)` lacks batch_first=True while x is (batch, time, D), so attention runs over the rows of the batch and not over time
import torch
from torch import nn

torch.manual_seed(0)
D = 24


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.pos = nn.Linear(3, D), nn.Parameter(torch.randn(1, 12, D) * 0.1)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(D, 2, 48, dropout=0.0) for _ in range(2))
        self.out = nn.Linear(D, 1)

    def forward(self, x):
        h = self.inp(x) + self.pos
        for l in self.layers:
            h = l(h)
        return self.out(h[:, -1])


net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(50):
    x = torch.randn(32, 12, 3)
    y = x[:, 2, :1]
    loss = nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
