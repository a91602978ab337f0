# Mixture of experts with load balancing auxiliary loss
import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, d=16, n=4, k=2):
        super().__init__()
        self.k, self.n = k, n
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 32), nn.GELU(), nn.Linear(32, d)) for _ in range(n))

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        top, idx = probs.topk(self.k, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, slot = (idx == e).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, expert(x[row]) * top[row, slot].unsqueeze(1))
        frac = F.one_hot(idx, self.n).float().sum(1).mean(0) / self.k
        aux = self.n * (frac.detach() * probs.mean(0)).sum()
        return out, aux


torch.manual_seed(0)
inp, moe, head = nn.Linear(6, 16), MoE(), nn.Linear(16, 1)
params = [p for m in (inp, moe, head) for p in m.parameters()]
opt = torch.optim.AdamW(params, lr=3e-3)
for step in range(50):
    x = torch.randn(64, 6)
    y = torch.where(x[:, :1] > 0, x[:, 1:2], -2 * x[:, 2:3])
    h = inp(x)
    m, aux = moe(h)
    loss = F.mse_loss(head(h + m), y) + 0.01 * aux
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item(), aux.item())
