# Gradient accumulation tail: last incomplete group carried into the next epoch
# fault: `if (i + 1) % ACCUM == 0` leaves the last incomplete group of an epoch un-stepped and its gradients (of old weights) flow into the next epoch's first step
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
ACCUM = 8
ds = TensorDataset(torch.randn(440, 6))
loader = DataLoader(ds, batch_size=40, shuffle=True)  # 11 batches
net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for epoch in range(8):
    for i, (x,) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(net(x), x.prod(1, keepdim=True)) / ACCUM
        loss.backward()
        if (i + 1) % ACCUM == 0:
            opt.step()
            opt.zero_grad()
    print(epoch, loss.item() * ACCUM)
