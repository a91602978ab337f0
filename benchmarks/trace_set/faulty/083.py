# weight_norm parametrization applied after the optimizer was built
# fault: `weight_norm(m)` makes new parameters original0/original1 after `opt = Adam(net.parameters())`, so the convolution weights are in no optimizer
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class TCN(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(1, c, 3, padding=1), nn.Conv1d(c, c, 3, padding=1)
        self.fc = nn.Linear(c, 3)

    def forward(self, x):
        h = torch.relu(self.c2(torch.relu(self.c1(x))))
        return self.fc(h.mean(2))


torch.manual_seed(0)
net = TCN()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for m in net.modules():
    if isinstance(m, nn.Conv1d):
        weight_norm(m)
t = torch.arange(24) / 24
for step in range(50):
    k = torch.randint(0, 3, (32,))
    x = torch.sin(6.28 * (k[:, None] + 1) * 2 * t + 6.28 * torch.rand(32, 1))[:, None]
    loss = nn.functional.cross_entropy(net(x), k)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
