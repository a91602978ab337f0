# Manual schedule writes to a local variable and not to the param group
# fault: `lr = decay(epoch)` inside `for g in opt.param_groups` assigns a local name instead of g["lr"], so the learning rate never changes
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BASE = 0.2
torch.manual_seed(0)
x = torch.randn(480, 8)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=40, shuffle=True)
net = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 4))
opt = torch.optim.SGD(net.parameters(), lr=BASE, momentum=0.9)


def adjust_learning_rate(opt, epoch):
    for g in opt.param_groups:
        lr = g["lr"]
        lr = BASE * 0.1 ** (epoch // 2)
    return lr


for epoch in range(6):
    lr = adjust_learning_rate(opt, epoch)
    for a, b in loader:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(a), b)
        loss.backward()
        opt.step()
    print(f"epoch {epoch} lr {lr:.4f} loss {loss.item():.4f}")
