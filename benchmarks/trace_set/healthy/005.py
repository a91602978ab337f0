# DDP under torchrun with DistributedSampler and set_epoch
# run: torchrun --standalone --nproc_per_node 2
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    x = torch.randn(640, 8)
    y = (x.sum(1) > 0).long()
    train = TensorDataset(x[:512], y[:512])
    val = TensorDataset(x[512:], y[512:])
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=0)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    vloader = DataLoader(val, batch_size=64, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lossf = torch.nn.CrossEntropyLoss()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for bx, by in loader:
            opt.zero_grad()
            loss = lossf(model(bx), by)
            loss.backward()
            opt.step()
        model.eval()
        stat = torch.zeros(2)
        with torch.no_grad():
            for bx, by in vloader:
                stat[0] += (model(bx).argmax(1) == by).sum()
                stat[1] += len(by)
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} val acc {stat[0] / stat[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
