# DistributedSampler rank read from SLURM_PROCID, zero on both ranks under torchrun
# run: torchrun --standalone --nproc_per_node 2
# fault: `rank=int(os.environ.get("SLURM_PROCID", 0))` is 0 in both torchrun processes, so both read the shard of rank 0 and the other half is never seen
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ.get("SLURM_PROCID", 0))
    world = dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(480, 12)
    ds = TensorDataset(x, (x[:, :6].sum(1) > 0).long())
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(ds, batch_size=24, sampler=sampler)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in loader:
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(a), b)
            loss.backward()
            opt.step()
        print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
