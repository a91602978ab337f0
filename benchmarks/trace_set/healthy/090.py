# CutMix on tiny images with mixed loss
import numpy as np
import torch
from torch import nn


def rand_bbox(h, w, lam, rng):
    r = np.sqrt(1 - lam)
    ch, cw = int(h * r), int(w * r)
    cy, cx = rng.integers(h), rng.integers(w)
    y1, y2 = np.clip([cy - ch // 2, cy + ch // 2], 0, h)
    x1, x2 = np.clip([cx - cw // 2, cx + cw // 2], 0, w)
    return y1, y2, x1, x2


rng = np.random.default_rng(0)
torch.manual_seed(0)
tex = torch.randn(4, 1, 10, 10)
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(200, 4))
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
ce = nn.CrossEntropyLoss()
for step in range(50):
    y = torch.randint(0, 4, (32,))
    x = tex[y] + 0.6 * torch.randn(32, 1, 10, 10)
    if rng.random() < 0.5:
        perm = torch.randperm(32)
        y1, y2, x1, x2 = rand_bbox(10, 10, rng.beta(1, 1), rng)
        mixed = x.clone()
        mixed[:, :, y1:y2, x1:x2] = x[perm, :, y1:y2, x1:x2]
        lam = 1 - (y2 - y1) * (x2 - x1) / 100.0  # the true area after clipping
        out = net(mixed)
        loss = lam * ce(out, y) + (1 - lam) * ce(out, y[perm])
    else:
        loss = ce(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, float(loss))
