# SWA: averaged weights saved but the BatchNorm statistics never updated for them
# fault: no `update_bn(loader, swa_model)` before evaluation and save, so the averaged weights run with the initial BatchNorm statistics
import io
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, SWALR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(600, 7) * 3 + 2
y = (x[:, :3] - 2).argmax(1)
loader = DataLoader(TensorDataset(x[:500], y[:500]), 50, shuffle=True)
net = nn.Sequential(nn.Linear(7, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
swa_model = AveragedModel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
swa_lr = SWALR(opt, swa_lr=0.05)
for epoch in range(6):
    net.train()
    for a, b in loader:
        opt.zero_grad()
        nn.functional.cross_entropy(net(a), b).backward()
        opt.step()
    if epoch >= 2:
        swa_model.update_parameters(net)
        swa_lr.step()
swa_model.eval()
with torch.no_grad():
    print("swa", (swa_model(x[500:]).argmax(1) == y[500:]).float().mean().item())
torch.save(swa_model.module.state_dict(), io.BytesIO())
