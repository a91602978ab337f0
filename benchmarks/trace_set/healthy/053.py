# Actor-critic A2C with detached advantage
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
SIZE, GAMMA = 5, 0.95
body = nn.Sequential(nn.Linear(SIZE, 32), nn.ReLU())
actor, critic = nn.Linear(32, 2), nn.Linear(32, 1)
params = [*body.parameters(), *actor.parameters(), *critic.parameters()]
opt = torch.optim.Adam(params, lr=5e-3)
for episode in range(40):
    pos, logp, vals, rews, ents = 0, [], [], [], []
    finished = False
    for _ in range(25):
        h = body(nn.functional.one_hot(torch.tensor(pos), SIZE).float())
        pi = Categorical(logits=actor(h))
        a = pi.sample()
        logp.append(pi.log_prob(a))
        vals.append(critic(h).squeeze())
        ents.append(pi.entropy())
        pos = max(0, min(SIZE - 1, pos + (1 if a.item() else -1)))
        finished = pos == SIZE - 1
        rews.append(1.0 if finished else -0.02)
        if finished:
            break
    with torch.no_grad():
        if finished:
            R = torch.tensor(0.0)
        else:
            R = critic(body(nn.functional.one_hot(torch.tensor(pos), SIZE).float())).squeeze()
    returns = []
    for r in reversed(rews):
        R = r + GAMMA * R
        returns.insert(0, R)
    returns, vals = torch.stack(returns), torch.stack(vals)
    adv = (returns - vals).detach()
    policy_loss = -(torch.stack(logp) * adv).mean()
    value_loss = nn.functional.mse_loss(vals, returns)
    loss = policy_loss + 0.5 * value_loss - 0.01 * torch.stack(ents).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(params, 1.0)
    opt.step()
print("steps in last episode", len(rews))
