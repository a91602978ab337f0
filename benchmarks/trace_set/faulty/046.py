# Best checkpoint kept as reference state_dict, not a copy
# fault: `best_state = model.state_dict()` is a reference to the live weights, so the "best" that is loaded at the end is the last epoch's model
import torch
from torch import nn

torch.manual_seed(0)
X = torch.randn(140, 30)
Y = (X[:, 0] + 1.5 * torch.randn(140) > 0).long()
model = nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 2))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
best, best_state = 1e9, None
for epoch in range(12):
    model.train()
    for i in torch.randperm(80).split(20):
        opt.zero_grad()
        nn.functional.cross_entropy(model(X[i]), Y[i]).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        val = nn.functional.cross_entropy(model(X[80:]), Y[80:]).item()
    if val < best:
        best = val
        best_state = model.state_dict()
model.load_state_dict(best_state)
with torch.no_grad():
    print("best seen", best, "restored", nn.functional.cross_entropy(model(X[80:]), Y[80:]).item())
