# IterableDataset sharded by worker info with two workers
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    """rows of a long file; each worker takes every n-th row"""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        w = get_worker_info()
        first, stride = (0, 1) if w is None else (w.id, w.num_workers)
        for i in range(first, self.n, stride):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(6, generator=g)
            yield x, x.sum().tanh()


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(Stream(400), batch_size=20, num_workers=2)
    for epoch in range(2):
        rows = 0
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            rows += len(x)
        print("epoch", epoch, "rows", rows, "loss", loss.item())


if __name__ == "__main__":
    main()
