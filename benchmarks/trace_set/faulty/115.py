# GradScaler skips every step because of NaN gradients of torch.where
# fault: `torch.where(d > 0, d.sqrt(), 0)` has a NaN gradient where d == 0, so the GradScaler finds a non-finite gradient in each batch and skips each optimizer step
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def pair_dist(z):
    d = (z[:, None] - z[None]).pow(2).sum(-1)
    return torch.where(d > 0, d.sqrt(), torch.zeros(()))


for step in range(40):
    x = torch.randn(24, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = net(x)
    want = torch.cdist(x[:, :2], x[:, :2])
    loss = (pair_dist(z.float()) - want).pow(2).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
