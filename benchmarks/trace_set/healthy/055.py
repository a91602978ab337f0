# CycleGAN-like pair of generators with requires_grad toggled on discriminators
import itertools
import torch
from torch import nn

torch.manual_seed(0)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 24), nn.ReLU(), nn.Linear(24, o))


def set_requires_grad(nets, flag):
    for n in nets:
        for p in n.parameters():
            p.requires_grad = flag


G_ab, G_ba, D_a, D_b = mlp(2, 2), mlp(2, 2), mlp(2, 1), mlp(2, 1)
opt_G = torch.optim.Adam(itertools.chain(G_ab.parameters(), G_ba.parameters()), lr=2e-3)
opt_D = torch.optim.Adam(itertools.chain(D_a.parameters(), D_b.parameters()), lr=2e-3)
mse = nn.MSELoss()


def gan(pred, is_real):
    return mse(pred, torch.full_like(pred, float(is_real)))


for step in range(40):
    a = torch.randn(32, 2)
    b = torch.randn(32, 2) * 0.5 + 2
    set_requires_grad([D_a, D_b], False)
    opt_G.zero_grad()
    fb, fa = G_ab(a), G_ba(b)
    loss_G = gan(D_b(fb), 1) + gan(D_a(fa), 1) + 5 * (G_ba(fb) - a).abs().mean() + 5 * (G_ab(fa) - b).abs().mean()
    loss_G.backward()
    opt_G.step()
    set_requires_grad([D_a, D_b], True)
    opt_D.zero_grad()
    loss_D = 0.5 * (gan(D_a(a), 1) + gan(D_a(fa.detach()), 0) + gan(D_b(b), 1) + gan(D_b(fb.detach()), 0))
    loss_D.backward()
    opt_D.step()
    if step % 10 == 0:
        print(step, loss_G.item(), loss_D.item())
