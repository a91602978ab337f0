# Target network is the same object as the online network in DQN
# fault: `target_net = policy_net` binds the same object, so the target moves with each update and there is no frozen target
import random
import torch
import torch.nn as nn

random.seed(0)
torch.manual_seed(0)
policy_net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
target_net = policy_net
optimizer = torch.optim.RMSprop(policy_net.parameters(), lr=1e-3)
memory = []
s = torch.randn(4)
for t in range(400):
    a = random.randint(0, 1)
    s2 = 0.9 * s + 0.1 * torch.randn(4) + (0.2 if a else -0.2)
    done = s2.abs().max() > 2.5
    memory.append((s, a, -s2.abs().mean().item(), s2, float(done)))
    s = torch.randn(4) if done else s2
for step in range(60):
    S, A, R, S2, D = zip(*random.sample(memory, 32))
    S, S2 = torch.stack(S), torch.stack(S2)
    q = policy_net(S).gather(1, torch.tensor(A)[:, None]).squeeze(1)
    with torch.no_grad():
        nxt = target_net(S2).max(1).values
    loss = nn.functional.smooth_l1_loss(q, torch.tensor(R) + 0.99 * nxt * (1 - torch.tensor(D)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        target_net.load_state_dict(policy_net.state_dict())
        print(step, loss.item())
