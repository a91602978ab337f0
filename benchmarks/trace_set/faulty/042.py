# Learning rate scheduler bound to an optimizer that was replaced later
# fault: `sched` is bound to the first SGD; after `optimizer = AdamW(...)` at epoch 2 the scheduler still steps the old one, so the new optimizer's lr never decays
import torch
from torch import nn, optim

torch.manual_seed(0)
x = torch.randn(400, 6)
y = x.sin().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 1))
optimizer = optim.SGD(net.parameters(), lr=0.05)
sched = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
for epoch in range(6):
    if epoch == 2:
        optimizer = optim.AdamW(net.parameters(), lr=1e-2)  # second phase
    for i in torch.randperm(400).split(40):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x[i]), y[i])
        loss.backward()
        optimizer.step()
    sched.step()
    print(epoch, loss.item(), optimizer.param_groups[0]["lr"])
