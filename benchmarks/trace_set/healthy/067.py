# DDP with seeds per rank for augmentation, same init by DDP broadcast
# run: torchrun --standalone --nproc_per_node 2
import random
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __init__(self, n=400):
        rs = np.random.RandomState(0)
        self.k = rs.randint(1, 4, n)
        self.ph = rs.rand(n)

    def __len__(self):
        return len(self.k)

    def __getitem__(self, i):
        t = np.arange(20) / 20
        x = np.sin(2 * np.pi * (self.k[i] * t + self.ph[i]))
        x = x * random.uniform(0.5, 2.0) + 0.2 * torch.randn(20).numpy()
        return torch.as_tensor(x, dtype=torch.float32), int(self.k[i] - 1)


def main(seed=17):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    random.seed(seed + rank)  # each rank its own augmentation and dropout noise
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    ds = Waves()
    sampler = DistributedSampler(ds, seed=seed)  # but one common permutation
    dl = DataLoader(ds, batch_size=20, sampler=sampler)
    net = DDP(torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 3)))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in dl:
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
    print(rank, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
