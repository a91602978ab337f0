# Multi-task with learned uncertainty weights in the same optimizer
import torch
from torch import nn


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.reg, self.cls = nn.Linear(32, 1), nn.Linear(32, 3)
        self.log_var = nn.Parameter(torch.zeros(2))

    def losses(self, x, r, c):
        h = self.trunk(x)
        return nn.functional.mse_loss(self.reg(h).squeeze(1), r), nn.functional.cross_entropy(self.cls(h), c)

    def total(self, *args):
        a, b = self.losses(*args)
        s = self.log_var
        # Kendall et al.: 1/(2 s^2) L_reg + 1/s^2 L_cls + log s + log s
        return 0.5 * torch.exp(-s[0]) * a + torch.exp(-s[1]) * b + 0.5 * s.sum()


torch.manual_seed(0)
x = torch.randn(512, 8)
r, c = x[:, 0] * 3, x[:, 1:4].argmax(1)
m = MultiTask()
opt = torch.optim.Adam(m.parameters(), lr=1e-2)
for ep in range(3):
    for i in torch.randperm(512).split(32):
        opt.zero_grad()
        loss = m.total(x[i], r[i], c[i])
        loss.backward()
        opt.step()
    print(ep, loss.item(), m.log_var.tolist())
