# REINFORCE policy gradient with moving baseline on a bandit-like corridor
import torch
from torch.distributions import Categorical

torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
baseline = 0.0
best_action = torch.tensor([2, 0, 1, 2])
for episode in range(60):
    logps, rewards = [], []
    for t in range(8):
        state = torch.zeros(4)
        k = torch.randint(0, 4, ()).item()
        state[k] = 1.0
        dist = Categorical(logits=policy(state))
        action = dist.sample()
        logps.append(dist.log_prob(action))
        rewards.append(1.0 if action == best_action[k] else 0.0)
    R = torch.tensor(rewards)  # contextual bandit: each reward belongs to its own action
    loss = -(torch.stack(logps) * (R - baseline)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    baseline = 0.9 * baseline + 0.1 * R.mean().item()
print("moving baseline", round(baseline, 3))
