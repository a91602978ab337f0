# Frame difference taken in uint8 wraps around
# fault: `diff = nxt - cur` is computed on uint8 frames, so negative differences wrap to values near 255 before `.float()`
import torch
from torch import nn


def clip(n):
    cur = torch.randint(60, 190, (n, 1, 8, 8), dtype=torch.uint8)
    way = torch.randint(0, 3, (n,))  # darker, same, brighter
    delta = (way - 1) * 12
    nxt = (cur.int() + delta[:, None, None, None] + torch.randint(-5, 6, cur.shape)).clamp(0, 255).to(torch.uint8)
    return cur, nxt, way


torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(50):
    cur, nxt, way = clip(32)
    diff = nxt - cur
    x = diff.float() / 32
    loss = nn.functional.cross_entropy(net(x), way)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
