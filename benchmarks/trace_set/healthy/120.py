# World model style: train autoencoder first, then freeze it and train a latent predictor
import torch
from torch import nn

torch.manual_seed(0)
OBS, LAT = 16, 3
render = torch.randn(3, OBS)


def episodes(n, T=8):
    s = torch.randn(n, 3)
    obs, act = [s @ render], []
    for _ in range(T):
        a = torch.randn(n, 1)
        s = 0.9 * s + 0.1 * torch.cat([a, s[:, :2]], 1)
        obs.append(s @ render)
        act.append(a)
    return torch.stack(obs, 1), torch.stack(act, 1)


obs, act = episodes(200)
enc, dec = nn.Linear(OBS, LAT), nn.Linear(LAT, OBS)
opt_ae = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=1e-2)
frames = obs.reshape(-1, OBS)
for epoch in range(2):
    for b in torch.randperm(len(frames)).split(100):
        opt_ae.zero_grad()
        rec = nn.functional.mse_loss(dec(enc(frames[b])), frames[b])
        rec.backward()
        opt_ae.step()
print("reconstruction", rec.item())

enc.requires_grad_(False)
with torch.no_grad():
    z = enc(obs)
dyn = nn.Sequential(nn.Linear(LAT + 1, 32), nn.ELU(), nn.Linear(32, LAT))
opt_dyn = torch.optim.Adam(dyn.parameters(), lr=5e-3)
for epoch in range(3):
    for b in torch.randperm(200).split(20):
        zt, zn = z[b, :-1], z[b, 1:]
        pred = zt + dyn(torch.cat([zt, act[b]], -1))
        loss = nn.functional.mse_loss(pred, zn)
        opt_dyn.zero_grad()
        loss.backward()
        opt_dyn.step()
    print(epoch, "latent prediction", loss.item())
