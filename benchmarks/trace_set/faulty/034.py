# IterableDataset not sharded, duplicated by two workers
# fault: `Lines.__iter__` does not look at get_worker_info, so with num_workers=2 each row comes twice an epoch
import torch
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    def __init__(self, n, seed):
        super().__init__()
        self.n, self.seed = n, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.n):
            v = torch.randn(5, generator=g)
            yield {"x": v, "y": (v[0] > v[1]).long()}


def train():
    torch.manual_seed(0)
    dl = DataLoader(Lines(300, 3), batch_size=25, num_workers=2)
    net = torch.nn.Linear(5, 2)
    opt = torch.optim.Adam(net.parameters(), lr=2e-2)
    for epoch in range(2):
        for batch in dl:
            loss = torch.nn.functional.cross_entropy(net(batch["x"]), batch["y"])
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    train()
