# load_state_dict(strict=False) with a module. prefix loads nothing
# fault: the checkpoint's keys begin with "module." and `load_state_dict(state, strict=False)` ignores them all, so fine-tuning starts from random weights
import io
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def train(model, opt, steps, w):
    for s in range(steps):
        x = torch.randn(32, 12)
        loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if s % 15 == 0:
            print(s, loss.item())


torch.manual_seed(0)
w = torch.randn(12, 3)
pre = nn.DataParallel(net())
train(pre.module, torch.optim.Adam(pre.parameters(), lr=5e-3), 45, w)
file = io.BytesIO()
torch.save({"state_dict": pre.state_dict()}, file)
file.seek(0)
model = net()
state = torch.load(file)["state_dict"]
model.load_state_dict(state, strict=False)
train(model, torch.optim.Adam(model.parameters(), lr=1e-3), 45, w + 0.1 * torch.randn(12, 3))
