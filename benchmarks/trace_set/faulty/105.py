# DDP: only rank 0 loads the checkpoint, after wrapping
# run: torchrun --standalone --nproc_per_node 2
# fault: `if rank == 0: model.module.load_state_dict(...)` after DDP was made (it broadcasts only at construction), so rank 1 goes on from random weights
import io
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    return nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 3))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(99)
    ckpt = io.BytesIO()
    torch.save(build().state_dict(), ckpt)  # stands for the file of an earlier job
    torch.manual_seed(0)
    model = DDP(build())
    if rank == 0:
        ckpt.seek(0)
        model.module.load_state_dict(torch.load(ckpt))
    dist.barrier()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(10 + rank)
    for step in range(40):
        x = torch.randn(24, 10, generator=g)
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(rank, loss.item())
    dist.destroy_process_group()


main()
