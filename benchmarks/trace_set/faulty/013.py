# model.eval() after validation, never back to train
# fault: `model.train()` is called once before the epoch loop and `evaluate` leaves the model in eval mode, so from epoch 2 on dropout and BatchNorm are off in training
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
full = TensorDataset(torch.randn(600, 1, 8, 8), torch.randint(0, 4, (600,)))
tr, va = random_split(full, [500, 100])
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2),
                      nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


@torch.no_grad()
def evaluate():
    model.eval()
    n = 0
    for x, y in DataLoader(va, 50):
        n += (model(x).argmax(1) == y).sum().item()
    return n / len(va)


model.train()
for epoch in range(4):
    for x, y in DataLoader(tr, 50, shuffle=True):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    print(epoch, loss.item(), evaluate())
