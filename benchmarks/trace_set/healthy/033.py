# SWA with AveragedModel, SWALR and update_bn at the end
import torch
from torch.optim.swa_utils import AveragedModel, SWALR, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(600, 10)
y = (x[:, :4] @ torch.randn(4, 3)).argmax(1)
train = DataLoader(TensorDataset(x[:500], y[:500]), batch_size=50, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
swa = AveragedModel(model)
swa_start, epochs = 3, 6
cos = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=epochs)
swa_sched = SWALR(opt, swa_lr=0.05, anneal_epochs=1)
for ep in range(epochs):
    model.train()
    for a, b in train:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(a), b).backward()
        opt.step()
    if ep >= swa_start:
        swa.update_parameters(model)
        swa_sched.step()
    else:
        cos.step()
update_bn(train, swa)
swa.eval()
with torch.no_grad():
    print("swa acc", (swa(x[500:]).argmax(1) == y[500:]).float().mean().item())
