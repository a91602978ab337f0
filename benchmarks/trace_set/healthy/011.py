# Curriculum: sorted-by-difficulty subset grows each epoch
import numpy as np
import torch

rng = np.random.default_rng(0)
N, EPOCHS = 600, 6
X = torch.tensor(rng.normal(size=(N, 10)), dtype=torch.float32)
noise = torch.tensor(rng.random(N), dtype=torch.float32)  # known label noise level = difficulty
y = X[:, 0] - X[:, 1] + noise * torch.randn(N)
easy_first = noise.argsort()
net = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(EPOCHS):
    frac = min(1.0, 0.3 + 0.15 * epoch)
    pool = easy_first[: int(frac * N)]
    pool = pool[torch.randperm(len(pool))]
    losses = []
    for idx in pool.split(30):
        pred = net(X[idx]).squeeze(1)
        loss = (pred - y[idx]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    print(f"epoch {epoch} pool {len(pool)} loss {np.mean(losses):.3f}")
