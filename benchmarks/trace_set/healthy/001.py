# DCGAN-like GAN on 1-d data, two optimizers, fake detached for the critic step
import torch
from torch import nn

torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self, z=8):
        super().__init__()
        self.z = z
        self.net = nn.Sequential(nn.Linear(z, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, n):
        return self.net(torch.randn(n, self.z))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def real_batch(n):
    return 3.0 + 0.5 * torch.randn(n, 1)


G, D = Generator(), Critic()
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
bs = 64
for it in range(40):
    # critic
    opt_d.zero_grad()
    real = real_batch(bs)
    fake = G(bs).detach()
    loss_d = bce(D(real), torch.ones(bs)) + bce(D(fake), torch.zeros(bs))
    loss_d.backward()
    opt_d.step()
    # generator; grads that reach D here are cleared by the next opt_d.zero_grad()
    opt_g.zero_grad()
    loss_g = bce(D(G(bs)), torch.ones(bs))
    loss_g.backward()
    opt_g.step()
    if it % 10 == 0:
        print(f"{it:3d} d={loss_d.item():.3f} g={loss_g.item():.3f}")
