# Full-batch training with the same tensor each step on purpose
import numpy as np
import torch

rs = np.random.RandomState(0)
t = np.linspace(0, 1, 80)
series = np.sin(9 * t) + 0.1 * rs.randn(80)
x = torch.tensor(np.vander(2 * t - 1, 8, increasing=True), dtype=torch.float64)
y = torch.tensor(series, dtype=torch.float64)
w = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))
opt = torch.optim.Adam([w], lr=0.1)
for it in range(60):  # 80 points: every step uses all of them
    opt.zero_grad()
    loss = ((x @ w - y) ** 2).mean() + 1e-4 * w.pow(2).sum()
    loss.backward()
    opt.step()
print("final", loss.item())
