# Two optimizers, SGD for dense and SparseAdam for sparse embedding
import torch
from torch import nn


class ClickModel(nn.Module):
    def __init__(self, n_items, d=16):
        super().__init__()
        self.bag = nn.EmbeddingBag(n_items, d, mode="sum", sparse=True)
        self.top = nn.Sequential(nn.Linear(d + 4, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, items, dense):
        return self.top(torch.cat([self.bag(items), dense], 1)).squeeze(1)


torch.manual_seed(0)
N = 512
items = torch.randint(0, 300, (N, 5))
dense = torch.randn(N, 4)
click = ((items < 60).any(1)).float()
m = ClickModel(300)
sparse_opt = torch.optim.SparseAdam(list(m.bag.parameters()), lr=1e-2)
dense_opt = torch.optim.SGD(m.top.parameters(), lr=5e-2, momentum=0.9)
for epoch in range(3):
    for b in torch.randperm(N).split(32):
        sparse_opt.zero_grad()
        dense_opt.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(m(items[b], dense[b]), click[b])
        loss.backward()
        sparse_opt.step()
        dense_opt.step()
    print(epoch, loss.item())
