# CLIP-like loss over all_gather without gradient, text tower never trains
# run: torchrun --standalone --nproc_per_node 2
# fault: `dist.all_gather(parts, txt)` returns tensors without a graph and the local part is not put back, so the text tower never gets a gradient
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(16, 12), nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 12))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, i, t):
        return F.normalize(self.image(i), dim=1), F.normalize(self.text(t), dim=1), self.logit_scale.exp()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(Clip(), find_unused_parameters=True)
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
A, B = torch.randn(6, 16), torch.randn(6, 10)
g = torch.Generator().manual_seed(40 + rank)
for step in range(40):
    s = torch.randn(16, 6, generator=g)
    img, txt, scale = model(s @ A, s @ B)
    parts = [torch.empty_like(txt) for _ in range(world)]
    dist.all_gather(parts, txt.contiguous())
    all_txt = torch.cat(parts)
    logits = scale * img @ all_txt.T
    labels = torch.arange(16) + 16 * rank
    loss = F.cross_entropy(logits, labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(rank, loss.item())
dist.destroy_process_group()
