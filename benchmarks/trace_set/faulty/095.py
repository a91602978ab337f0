# random_split shares one dataset, switching off augmentation for validation switches it off for training
# fault: `val.dataset.augment = False` changes the one dataset that both splits of random_split share, so training runs without augmentation too
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Images(Dataset):
    def __init__(self, n=360):
        self.y = torch.randint(0, 2, (n,))
        self.x = torch.randn(n, 1, 6, 6)
        self.x[self.y == 1, :, :, :3] += 0.8
        self.augment = True

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.augment:
            x = x.flip(1) if torch.rand(()) < 0.5 else x
            x = x + 0.3 * torch.randn_like(x)
        return x, self.y[i]


torch.manual_seed(0)
train, val = random_split(Images(), [300, 60])
val.dataset.augment = False
net = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 2))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(4):
    net.train()
    for x, y in DataLoader(train, 30, shuffle=True):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        print(epoch, loss.item(), sum((net(x).argmax(1) == y).sum().item() for x, y in DataLoader(val, 30)) / 60)
