# Deep ensembles: three independent models trained in the same loop
import torch
from torch import nn

torch.manual_seed(0)
x = torch.rand(300, 1) * 4 - 2
y = x ** 3 + 0.3 * torch.randn_like(x)
members = [nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2)) for _ in range(3)]
opts = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in members]


def nll(out, t):
    mu, lv = out.chunk(2, 1)
    return 0.5 * (lv + (t - mu) ** 2 / lv.exp()).mean()


for epoch in range(4):
    for m, o in zip(members, opts):  # every member shuffles for itself
        for i in torch.randperm(300).split(60):
            o.zero_grad()
            loss = nll(m(x[i]), y[i])
            loss.backward()
            o.step()
    with torch.no_grad():
        g = torch.linspace(-2, 2, 50)[:, None]
        mus = torch.stack([m(g)[:, :1] for m in members])
    print(epoch, loss.item(), "disagreement", mus.std(0).mean().item())
