# Random split of overlapping windows of one series leaks validation
# fault: `random_split` of sliding windows with stride 1 puts windows into validation that share all but one value with a training window
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Windows(Dataset):
    def __init__(self, series, lag):
        self.s, self.lag = series, lag

    def __len__(self):
        return len(self.s) - self.lag

    def __getitem__(self, i):
        w = self.s[i:i + self.lag + 1]
        return w[:-1], w[-1:]


torch.manual_seed(0)
walk = torch.randn(620).cumsum(0) / 10
train, val = random_split(Windows(walk, 20), [500, 100])
net = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(4):
    for x, y in DataLoader(train, 50, shuffle=True):
        opt.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        opt.step()
    with torch.no_grad():
        print(epoch, sum(nn.functional.mse_loss(net(x), y).item() for x, y in DataLoader(val, 50)) / 2)
