# Cosine schedule T_max in epochs but stepped per batch, lr goes up and down again
# fault: `CosineAnnealingLR(opt, T_max=EPOCHS)` is stepped per batch, so the lr swings down and up every 2*EPOCHS batches instead of once over the run
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, LR = 5, 0.1
torch.manual_seed(0)
x = torch.randn(480, 10)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=40, shuffle=True)
net = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
opt = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
scheduler = CosineAnnealingLR(opt, T_max=EPOCHS)
for epoch in range(EPOCHS):
    for a, b in loader:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(a), b)
        loss.backward()
        opt.step()
        scheduler.step()
    print(epoch, loss.item(), scheduler.get_last_lr()[0])
