# WGAN-GP with five critic steps per generator step
import torch
from torch import autograd, nn

torch.manual_seed(0)
Z, N_CRITIC, LAMBDA = 6, 5, 10.0
gen = nn.Sequential(nn.Linear(Z, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
og = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.9))
oc = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))


def real(n=64):
    return torch.randn(n, 2) * torch.tensor([0.2, 1.0]) + 1.0


def penalty(a, b):
    t = torch.rand(len(a), 1)
    x = (t * a + (1 - t) * b).requires_grad_(True)
    (g,) = autograd.grad(critic(x).sum(), x, create_graph=True)
    return ((g.norm(2, dim=1) - 1) ** 2).mean()


for step in range(12):
    for _ in range(N_CRITIC):
        r = real()
        with torch.no_grad():
            f = gen(torch.randn(64, Z))
        loss_c = critic(f).mean() - critic(r).mean() + LAMBDA * penalty(r, f)
        oc.zero_grad()
        loss_c.backward()
        oc.step()
    loss_g = -critic(gen(torch.randn(64, Z))).mean()
    og.zero_grad()
    loss_g.backward()
    og.step()
    print(step, loss_c.item(), loss_g.item())
