# MC-dropout: dropout left on in validation on purpose, BatchNorm in eval
import torch
from torch import nn


def enable_dropout(model):
    for m in model.modules():
        if isinstance(m, (nn.Dropout, nn.Dropout1d)):
            m.train()


torch.manual_seed(0)
X = torch.rand(400, 1) * 6 - 3
Y = X.sin() + 0.1 * torch.randn_like(X)
net = nn.Sequential(nn.Linear(1, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(),
                    nn.Dropout(0.1), nn.Linear(64, 1))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
vx, vy = X[320:], Y[320:]
for epoch in range(4):
    net.train()
    for i in torch.randperm(320).split(32):
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(X[i]), Y[i])
        loss.backward()
        opt.step()
    net.eval()
    enable_dropout(net)  # Monte Carlo dropout: 20 stochastic passes, BatchNorm uses running statistics
    with torch.no_grad():
        draws = torch.stack([net(vx) for _ in range(20)])
    print(epoch, "rmse", (draws.mean(0) - vy).pow(2).mean().sqrt().item(), "spread", draws.std(0).mean().item())
