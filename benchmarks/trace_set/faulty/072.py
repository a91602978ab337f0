# VAE KL summed over dims but averaged with reconstruction mean, posterior collapse
# fault: the reconstruction is `F.mse_loss(recon, x)` (mean over all pixels) while the KL is summed over the latent dims and rows, so KL is far too heavy and the posterior collapses
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
enc = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
dec = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=2e-3)
protos = torch.rand(6, 64)


def step(x):
    mu, logvar = enc(x).chunk(2, dim=-1)
    z = mu + (0.5 * logvar).exp() * torch.randn_like(mu)
    recon = dec(z).sigmoid()
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return F.mse_loss(recon, x) + kld, kld


for i in range(60):
    x = protos[torch.randint(0, 6, (32,))]
    loss, kld = step(x)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 20 == 0:
        print(i, loss.item(), "kl per row", kld.item() / 32)
