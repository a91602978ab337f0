# IterableDataset sharded by rank and by worker under DDP
# run: torchrun --standalone --nproc_per_node 2
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    def __init__(self, n, rank, world):
        self.n, self.rank, self.world = n, rank, world

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        me, parts = self.rank * nw + wid, self.world * nw
        for i in range(me, self.n, parts):
            g = torch.Generator().manual_seed(10_000 + i)
            x = torch.randn(4, generator=g)
            yield x, x.mul(torch.tensor([1.0, -2.0, 0.5, 0.0])).sum()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dl = DataLoader(Shards(480, rank, world), batch_size=20, num_workers=2)  # 120 rows a worker, 6 full batches
    net = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(2):
        for x, y in dl:
            loss = torch.nn.functional.mse_loss(net(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(rank, epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
