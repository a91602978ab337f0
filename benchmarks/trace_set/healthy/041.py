# VAE with reparameterisation and KL warm-up
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class VAE(nn.Module):
    def __init__(self, d=20, z=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 32), nn.Tanh())
        self.mu, self.logvar = nn.Linear(32, z), nn.Linear(32, z)
        self.dec = nn.Sequential(nn.Linear(z, 32), nn.Tanh(), nn.Linear(32, d))

    def forward(self, x):
        h = self.enc(x)
        mu, lv = self.mu(h), self.logvar(h)
        z = mu + torch.exp(0.5 * lv) * torch.randn_like(mu)
        return self.dec(z), mu, lv


probs = torch.rand(3, 20)
x_all = torch.bernoulli(probs[torch.randint(0, 3, (500,))])
vae = VAE()
opt = torch.optim.Adam(vae.parameters(), lr=5e-3)
EPOCHS = 5
for ep in range(EPOCHS):
    beta = min(1.0, ep / 3)
    for i in torch.randperm(500).split(50):
        x = x_all[i]
        logits, mu, lv = vae(x)
        rec = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        kl = -0.5 * (1 + lv - mu ** 2 - lv.exp()).sum(1).mean()
        loss = rec + beta * kl
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(ep, f"beta {beta:.2f} rec {rec.item():.2f} kl {kl.item():.2f}")
