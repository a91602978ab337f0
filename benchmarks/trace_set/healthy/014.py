# MAML with functional_call and create_graph inner loop on sine waves
import math
import torch
from torch import nn
from torch.func import functional_call

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3)
INNER_LR, INNER_STEPS, TASKS = 0.05, 2, 4


def task():
    amp, ph = torch.empty(()).uniform_(0.5, 3), torch.empty(()).uniform_(0, math.pi)

    def sample(k=10):
        x = torch.empty(k, 1).uniform_(-5, 5)
        return x, amp * torch.sin(x + ph)
    return sample


def adapt(params, x, y):
    for _ in range(INNER_STEPS):
        loss = nn.functional.mse_loss(functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {n: p - INNER_LR * g for (n, p), g in zip(params.items(), grads)}
    return params


for it in range(30):
    outer = 0.0
    for _ in range(TASKS):
        sample = task()
        fast = adapt(dict(net.named_parameters()), *sample())
        xq, yq = sample()
        outer = outer + nn.functional.mse_loss(functional_call(net, fast, (xq,)), yq)
    outer = outer / TASKS
    meta_opt.zero_grad()
    outer.backward()
    meta_opt.step()
    if it % 10 == 0:
        print(it, outer.item())
