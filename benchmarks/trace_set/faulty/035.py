# numpy random augmentation the same in each worker and each epoch
# fault: `np.random.seed(0)` in the worker_init_fn `fix_seed` gives each worker in each epoch the same numpy stream, so the "random" augmentation repeats
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Signals(Dataset):
    def __init__(self, n=320):
        rs = np.random.RandomState(1)
        self.y = rs.randint(0, 3, n)
        t = np.linspace(0, 1, 16)
        self.x = np.sin(2 * np.pi * t[None] * (self.y[:, None] + 1)).astype("float32")

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = np.roll(self.x[i], np.random.randint(16))
        x = x + np.random.normal(0, 0.5, 16).astype("float32")
        return torch.from_numpy(x), int(self.y[i])


def fix_seed(worker_id):
    np.random.seed(0)


if __name__ == "__main__":
    torch.manual_seed(0)
    dl = DataLoader(Signals(), batch_size=16, shuffle=True, num_workers=2, worker_init_fn=fix_seed)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(2):
        for x, y in dl:
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
        print(epoch, loss.item())
