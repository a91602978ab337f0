# itertools.cycle over the loader replays the cached first epoch, no new shuffle or augmentation
# fault: `stream = itertools.cycle(loader)` stores the batches of the first pass and repeats them, so neither the shuffle nor the random noise of the dataset is ever drawn again
import itertools
import torch
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 10)
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.5 * torch.randn(10), self.y[i]


torch.manual_seed(0)
loader = DataLoader(Noisy(160), batch_size=16, shuffle=True)
stream = itertools.cycle(loader)
net = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(60):
    x, y = next(stream)
    opt.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    if step % 15 == 0:
        print(step, loss.item())
