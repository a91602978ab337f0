# PINN: derivatives by autograd.grad with create_graph
import math
import torch
from torch import nn

torch.manual_seed(0)
u = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
opt = torch.optim.Adam(u.parameters(), lr=5e-3)


def grad(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


# u'' = -pi^2 sin(pi x) on [0, 1], u(0) = u(1) = 0
for it in range(60):
    x = torch.rand(64, 1, requires_grad=True)
    y = u(x)
    res = grad(grad(y, x), x) + math.pi ** 2 * torch.sin(math.pi * x)
    edge = u(torch.tensor([[0.0], [1.0]]))
    loss = res.pow(2).mean() + 50 * edge.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 20 == 0:
        print(it, loss.item())
with torch.no_grad():
    g = torch.linspace(0, 1, 11)[:, None]
    print("max error", (u(g) - torch.sin(math.pi * g)).abs().max().item())
