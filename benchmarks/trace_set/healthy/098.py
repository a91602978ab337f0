# Per-sample gradients with vmap and DP-SGD clipping and noise
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.3)
CLIP, SIGMA, LOT = 1.0, 0.6, 50
X = torch.randn(400, 6)
Y = (X[:, 0] - X[:, 1] > 0).long()


def loss_one(params, x, y):
    out = functional_call(net, params, (x.unsqueeze(0),))
    return nn.functional.cross_entropy(out, y.unsqueeze(0))


per_sample = vmap(grad(loss_one), in_dims=(None, 0, 0))
for step in range(40):
    pick = (torch.rand(len(X)) < LOT / len(X)).nonzero().squeeze(1)  # Poisson sampling
    params = {k: v.detach() for k, v in net.named_parameters()}
    g = per_sample(params, X[pick], Y[pick])
    norms = torch.sqrt(sum(t.flatten(1).pow(2).sum(1) for t in g.values()))
    factor = (CLIP / (norms + 1e-6)).clamp(max=1.0)
    opt.zero_grad()
    for n, p in net.named_parameters():
        clipped = (g[n] * factor.view(-1, *[1] * (g[n].ndim - 1))).sum(0)
        p.grad = (clipped + SIGMA * CLIP * torch.randn_like(p)) / LOT
    opt.step()
    if step % 10 == 0:
        with torch.no_grad():
            print(step, (net(X).argmax(1) == Y).float().mean().item())
