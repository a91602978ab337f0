# AGC adaptive gradient clipping written by hand
import torch
from torch import nn


def unitwise(x):
    if x.ndim <= 1:
        return x.norm()
    return x.flatten(1).norm(dim=1).view(-1, *[1] * (x.ndim - 1))


@torch.no_grad()
def agc(params, clip=0.05, eps=1e-3):
    for p in params:
        if p.grad is None:
            continue
        limit = unitwise(p).clamp(min=eps) * clip
        g = unitwise(p.grad)
        p.grad.mul_(torch.where(g > limit, limit / g.clamp(min=1e-6), torch.ones_like(g)))


torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))
head = list(net[-1].parameters())
body = [p for m in net[:-1] for p in m.parameters()]
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for step in range(40):
    y = torch.randint(0, 3, (32,))
    x = torch.randn(32, 1, 8, 8)
    x[torch.arange(32), 0, y] += 1.5
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    agc(body)  # the paper leaves the last layer unclipped
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
