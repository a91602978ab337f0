# Gradient clipping applied to cloned copies of the gradients
# fault: `grads = [p.grad.clone() for p in ...]` are clipped, not the gradients themselves, so the optimizer steps with the unclipped ones
import torch
from torch import nn


def clip_(grads, max_norm):
    total = torch.sqrt(sum(g.pow(2).sum() for g in grads))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return total


torch.manual_seed(0)
rnn, head = nn.RNN(4, 48, batch_first=True), nn.Linear(48, 1)
params = [*rnn.parameters(), *head.parameters()]
opt = torch.optim.SGD(params, lr=0.1)
for it in range(50):
    x = torch.randn(16, 30, 4)
    loss = (head(rnn(x)[0][:, -1]) - x.sum((1, 2))[:, None] / 5).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    grads = [p.grad.clone() for p in params]
    norm = clip_(grads, 0.5)
    opt.step()
    if it % 10 == 0:
        print(it, loss.item(), norm.item())
