# KL divergence given probabilities where log-probabilities are expected
# fault: `F.kl_div(F.softmax(s, -1), F.softmax(t, -1))` passes probabilities as input, but kl_div expects log-probabilities there
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
big = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 5)).eval().requires_grad_(False)
small = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
optimizer = torch.optim.Adam(small.parameters(), lr=5e-3)
for step in range(60):
    x = torch.randn(64, 8)
    t = big(x) * 3
    s = small(x)
    loss = F.kl_div(F.softmax(s, -1), F.softmax(t, -1), reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item(), (s.argmax(1) == t.argmax(1)).float().mean().item())
