# VAE reparameterisation with the standard deviation under no_grad
# fault: `torch.no_grad()` around `std = torch.exp(0.5 * logvar)` cuts the reparameterisation, so the decoder loss gives no gradient to logvar
import torch
from torch import nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
        self.d = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 10))

    def reparameterize(self, mu, logvar):
        with torch.no_grad():
            std = torch.exp(0.5 * logvar)
            eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x):
        mu, logvar = self.e(x).chunk(2, 1)
        return self.d(self.reparameterize(mu, logvar)), mu, logvar


torch.manual_seed(0)
basis = torch.randn(3, 10)
vae = VAE()
opt = torch.optim.Adam(vae.parameters(), lr=3e-3)
for step in range(60):
    x = torch.randn(64, 3) @ basis
    r, mu, lv = vae(x)
    loss = F.mse_loss(r, x, reduction="sum") / 64 - 0.5 * (1 + lv - mu ** 2 - lv.exp()).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0:
        print(step, loss.item())
