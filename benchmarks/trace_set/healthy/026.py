# Alternating losses per step: even steps reconstruct, odd steps classify
import itertools
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
enc = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
dec = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24))
clf = nn.Linear(8, 3)
opt = torch.optim.Adam(itertools.chain(enc.parameters(), dec.parameters(), clf.parameters()), lr=3e-3)
mix = torch.randn(6, 24)


def batch(n=32):
    z = torch.randn(n, 6)
    return z @ mix + 0.05 * torch.randn(n, 24), z[:, :3].argmax(1)


for it in range(60):
    x, y = batch()
    opt.zero_grad(set_to_none=True)  # heads not used in this turn keep grad None and Adam leaves them alone
    if it % 2 == 0:
        loss = F.mse_loss(dec(enc(x)), x)
    else:
        loss = F.cross_entropy(clf(enc(x)), y)
    loss.backward()
    opt.step()
    if it % 20 < 2:
        print(it, "recon" if it % 2 == 0 else "class", loss.item())
