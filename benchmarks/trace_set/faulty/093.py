# persistent_workers keep the old copy of the dataset, its set_epoch never arrives
# fault: with `persistent_workers=True` the workers keep the dataset copy of the first epoch, so `ds.set_epoch(epoch)` in the main process never reaches them and the crops are the same in each epoch
import torch
from torch.utils.data import DataLoader, Dataset


class Crops(Dataset):
    def __init__(self, n=160):
        g = torch.Generator().manual_seed(0)
        self.long = torch.randn(n, 40, generator=g).cumsum(1)
        self.epoch = 0

    def set_epoch(self, e):
        self.epoch = e

    def __len__(self):
        return len(self.long)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 * self.epoch + i)
        s = int(torch.randint(0, 23, (), generator=g))
        piece = self.long[i, s:s + 17]
        return piece[:16], piece[16:]


if __name__ == "__main__":
    torch.manual_seed(0)
    ds = Crops()
    dl = DataLoader(ds, batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(4):
        ds.set_epoch(epoch)
        for x, y in dl:
            loss = torch.nn.functional.mse_loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(epoch, loss.item())
