# clamp of log-variance saturates, gradient is dead from the start
# fault: `log_var = self.lv(h).clamp(min=2.0)` starts at the bound for all rows (the head begins near 0), so the variance head's gradient is zero for ever
import torch
from torch import nn


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 48), nn.Tanh())
        self.mu, self.lv = nn.Linear(48, 1), nn.Linear(48, 1)

    def forward(self, x):
        h = self.body(x)
        log_var = self.lv(h).clamp(min=2.0, max=10.0)
        return self.mu(h), log_var


torch.manual_seed(0)
net = Gaussian()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(60):
    x = torch.randn(64, 3)
    y = x.sum(1, keepdim=True) + 0.1 * x[:, :1].abs() * torch.randn(64, 1)
    mu, lv = net(x)
    loss = 0.5 * (lv + (y - mu) ** 2 * (-lv).exp()).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 15 == 0:
        print(step, loss.item())
