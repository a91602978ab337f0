# Neural ODE style fixed-step integrator trained on a spiral
import torch
from torch import nn

torch.manual_seed(0)
DT, STEPS = 0.1, 10
A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])


def rk4(f, y, n):
    out = [y]
    for _ in range(n):
        k1 = f(y)
        k2 = f(y + DT / 2 * k1)
        k3 = f(y + DT / 2 * k2)
        k4 = f(y + DT * k3)
        y = y + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        out.append(y)
    return torch.stack(out, 1)


field = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
opt = torch.optim.RMSprop(field.parameters(), lr=5e-3)
for it in range(40):
    y0 = torch.randn(32, 2)
    with torch.no_grad():
        true = rk4(lambda y: y @ A.T, y0, STEPS)
    pred = rk4(field, y0, STEPS)
    loss = (pred - true).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 10 == 0:
        print(it, loss.item())
