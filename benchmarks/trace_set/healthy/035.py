# Early stopping with best state deep-copied and restored
import copy
import torch
from torch import nn


class EarlyStopping:
    def __init__(self, patience=2):
        self.patience, self.bad, self.best, self.state = patience, 0, float("inf"), None

    def __call__(self, value, model):
        if value < self.best:
            self.best, self.bad = value, 0
            self.state = copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


torch.manual_seed(0)
X = torch.randn(300, 20)
Y = X[:, :1] + 0.5 * torch.randn(300, 1)
tr, va, te = slice(0, 150), slice(150, 220), slice(220, 300)
model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
stop = EarlyStopping()
for epoch in range(12):
    model.train()
    for i in torch.randperm(150).split(30):
        opt.zero_grad()
        nn.functional.mse_loss(model(X[tr][i]), Y[tr][i]).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        v = nn.functional.mse_loss(model(X[va]), Y[va]).item()
    print(epoch, v)
    if stop(v, model):
        break
model.load_state_dict(stop.state)
model.eval()
with torch.no_grad():
    print("test", nn.functional.mse_loss(model(X[te]), Y[te]).item())
