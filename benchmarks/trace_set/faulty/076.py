# DQN terminal state bootstraps (done mask missing)
# fault: the target `R + GAMMA * target(S2).max(1).values` has no `(1 - done)`, so values bootstrap beyond terminal states
import copy
import random
import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)
GAMMA, L = 0.99, 7
q = nn.Sequential(nn.Linear(L, 32), nn.ReLU(), nn.Linear(32, 2))
target = copy.deepcopy(q)
opt = torch.optim.Adam(q.parameters(), lr=3e-3)
eye = torch.eye(L)
buf, p = [], 3
for _ in range(600):
    a = random.randint(0, 1)
    p2 = p + (1 if a else -1)
    done = p2 in (0, L - 1)
    buf.append((p, a, 1.0 if p2 == L - 1 else 0.0, p2, done))
    p = 3 if done else p2
for step in range(60):
    S, A, R, S2, done = zip(*random.sample(buf, 64))
    R = torch.tensor(R)
    with torch.no_grad():
        y = R + GAMMA * target(eye[list(S2)]).max(1).values
    pred = q(eye[list(S)]).gather(1, torch.tensor(A)[:, None]).squeeze(1)
    loss = nn.functional.mse_loss(pred, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        target.load_state_dict(q.state_dict())
        print(step, loss.item(), q(eye).max().item())
