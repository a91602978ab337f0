# DQN with replay buffer and hard target network sync
import copy
import random
from collections import deque, namedtuple
import torch
import torch.nn as nn

Transition = namedtuple("Transition", "s a r s2 done")


class Corridor:
    def reset(self):
        self.p = 0
        self.t = 0
        return self.obs()

    def obs(self):
        o = torch.zeros(6)
        o[self.p] = 1
        return o

    def step(self, a):
        self.t += 1
        self.p = max(0, min(5, self.p + (1 if a == 1 else -1)))
        terminal = self.p == 5
        return self.obs(), float(terminal), terminal, self.t >= 30


random.seed(0)
torch.manual_seed(0)
q = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
q_target = copy.deepcopy(q).requires_grad_(False)
memory = deque(maxlen=1000)
opt = torch.optim.Adam(q.parameters(), lr=5e-3)
env, s = Corridor(), None
updates = 0
s = env.reset()
for frame in range(200):
    eps = max(0.1, 1 - frame / 120)
    if random.random() < eps:
        a = random.randrange(2)
    else:
        with torch.no_grad():
            a = q(s).argmax().item()
    s2, r, terminal, truncated = env.step(a)
    memory.append(Transition(s, a, r, s2, terminal))  # a time limit is no terminal state
    s = env.reset() if (terminal or truncated) else s2
    if len(memory) >= 64 and frame % 3 == 0:
        b = Transition(*zip(*random.sample(list(memory), 32)))
        S, S2 = torch.stack(b.s), torch.stack(b.s2)
        A, R = torch.tensor(b.a), torch.tensor(b.r)
        D = torch.tensor(b.done, dtype=torch.float32)
        with torch.no_grad():
            y = R + 0.95 * (1 - D) * q_target(S2).max(1).values
        qa = q(S).gather(1, A[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(qa, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(q.parameters(), 1.0)
        opt.step()
        updates += 1
        if updates % 10 == 0:
            q_target.load_state_dict(q.state_dict())
print("updates", updates, "loss", loss.item())
