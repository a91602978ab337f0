# Forward via ddp.module, gradients never synchronised
# run: torchrun --standalone --nproc_per_node 2
# fault: `out = model.module(x)` bypasses DDP's forward, so gradients are not synchronised over the ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(512, 10)
    ds = TensorDataset(x, x.abs().mean(1))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            out = model.module(x)
            loss = torch.nn.functional.l1_loss(out.squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(dist.get_rank(), epoch, loss.item())
    dist.destroy_process_group()


main()
