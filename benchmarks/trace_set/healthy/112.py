# Time series forecasting with walk-forward split and normalisation from train only
import numpy as np
import torch
from torch import nn

rs = np.random.RandomState(0)
t = np.arange(700)
series = 0.01 * t + np.sin(t / 8) + 0.2 * rs.randn(700)
LAG = 16


def windows(s):
    x = np.lib.stride_tricks.sliding_window_view(s, LAG)[:-1]
    return torch.tensor(x.copy(), dtype=torch.float32), torch.tensor(s[LAG:], dtype=torch.float32)


for fold, cut in enumerate((400, 500, 600)):  # walk forward: train on the past, test on the next 100
    torch.manual_seed(fold)
    past = series[:cut]
    mu, sd = past.mean(), past.std()
    X, Y = windows((past - mu) / sd)
    Xt, Yt = windows((series[cut - LAG:cut + 100] - mu) / sd)
    net = nn.Sequential(nn.Linear(LAG, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(2):
        for i in torch.randperm(len(X)).split(48):
            opt.zero_grad()
            loss = nn.functional.mse_loss(net(X[i]).squeeze(1), Y[i])
            loss.backward()
            opt.step()
    with torch.no_grad():
        rmse = sd * (net(Xt).squeeze(1) - Yt).pow(2).mean().sqrt().item()
    print("fold", fold, "train", loss.item(), "test rmse", rmse)
