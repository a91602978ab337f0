# Augmentation applied to cached tensor in place, noise piles up over epochs
# fault: `img.add_(...)` in `__getitem__` changes the cached tensor in place, so the noise piles up over the epochs
import torch
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    def __init__(self, n=300):
        g = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, 3, (n,), generator=g)
        self.images = torch.zeros(n, 9)
        self.images[torch.arange(n), self.labels * 3] = 2.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        img = self.images[i]
        img.add_(0.5 * torch.randn(9))
        return img, self.labels[i]


torch.manual_seed(1)
ds = Cached()
net = torch.nn.Sequential(torch.nn.Linear(9, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(6):
    tot = 0.0
    for x, y in DataLoader(ds, batch_size=30, shuffle=True):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        tot += loss.item()
    print(epoch, tot / 10)
