# VQ-VAE with straight-through estimator and commitment loss
import torch
import torch.nn as nn
import torch.nn.functional as F


class VectorQuantizer(nn.Module):
    def __init__(self, k, d, beta=0.25):
        super().__init__()
        self.code = nn.Embedding(k, d)
        self.code.weight.data.uniform_(-1, 1)
        self.beta = beta

    def forward(self, z):
        idx = torch.cdist(z, self.code.weight).argmin(1)
        q = self.code(idx)
        loss = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), loss, idx


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4), nn.LayerNorm(4, elementwise_affine=False))
        self.vq = VectorQuantizer(16, 4)
        self.dec = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, x):
        q, l, idx = self.vq(self.enc(x))
        return self.dec(q), l, idx


torch.manual_seed(0)
centres = torch.randn(8, 12)
model = VQVAE()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(60):
    x = centres[torch.randint(0, 8, (64,))] + 0.1 * torch.randn(64, 12)
    recon, vq, idx = model(x)
    loss = F.mse_loss(recon, x) + vq
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 20 == 0:
        print(step, loss.item(), "codes used", idx.unique().numel())
