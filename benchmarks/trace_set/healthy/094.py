# Online learning: one pass over a drifting stream, prequential evaluation before each update
import math
import torch

torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
cum, n = 0.0, 0


def stream(T=60):
    for t in range(T):
        ang = 2 * math.pi * t / 120
        w = torch.tensor([math.cos(ang), math.sin(ang), 0.5])
        x = torch.randn(8, 3)
        yield x, x @ w


for t, (x, y) in enumerate(stream()):
    pred = net(x).squeeze(1)
    loss = (pred - y).pow(2).mean()
    cum, n = cum + loss.item(), n + 1  # test first,
    opt.zero_grad()
    loss.backward()                      # then train on the same rows, once
    opt.step()
    if t % 15 == 14:
        print(t, "prequential mse", cum / n)
        cum, n = 0.0, 0
