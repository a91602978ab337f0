# Replay buffer stores views of one state array, all entries the same
# fault: `buffer.append((state, a, r, nxt))` stores the environment's own array, which is updated in place, so all stored states are the same last one
import random
import numpy as np
import torch
from torch import nn


class Env:
    def __init__(self):
        self.rs = np.random.RandomState(0)
        self.x = np.zeros(4, dtype=np.float32)

    def step(self, a):
        self.x *= 0.95
        self.x += (0.2 if a else -0.2) + 0.1 * self.rs.randn(4).astype(np.float32)
        return self.x, -float(np.abs(self.x).mean())


random.seed(1)
torch.manual_seed(1)
env, buffer = Env(), []
state = env.x
for _ in range(500):
    a = random.randint(0, 1)
    nxt, r = env.step(a)
    buffer.append((state, a, r, nxt))
    state = nxt
q = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
tgt = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
tgt.load_state_dict(q.state_dict())
opt = torch.optim.Adam(q.parameters(), lr=2e-3)
for k in range(50):
    s, a, r, n = zip(*random.sample(buffer, 32))
    s, n = torch.tensor(np.stack(s)), torch.tensor(np.stack(n))
    with torch.no_grad():
        y = torch.tensor(r) + 0.9 * tgt(n).max(1).values
    loss = nn.functional.smooth_l1_loss(q(s).gather(1, torch.tensor(a)[:, None]).squeeze(1), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if k % 10 == 0:
        tgt.load_state_dict(q.state_dict())
        print(k, loss.item())
