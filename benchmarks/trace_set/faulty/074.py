# Advantages not detached: critic trained by the policy loss
# fault: `adv = returns - values` is not detached, so the policy loss also trains the critic (with the wrong aim) instead of only weighting the actor
import torch
from torch import nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


torch.manual_seed(0)
agent = Agent()
opt = torch.optim.Adam(agent.parameters(), lr=5e-3)
for it in range(40):
    s = torch.randn(4)
    logps, vals, rews = [], [], []
    for t in range(20):
        pi = Categorical(logits=agent.actor(s))
        a = pi.sample()
        logps.append(pi.log_prob(a))
        vals.append(agent.critic(s).squeeze())
        s = 0.9 * s + 0.3 * torch.randn(4) + (0.3 if a.item() else -0.3)
        rews.append(-s.abs().mean().item())
    ret, out = 0.0, []
    for r in reversed(rews):
        ret = r + 0.9 * ret
        out.insert(0, ret)
    returns, values = torch.tensor(out), torch.stack(vals)
    adv = returns - values
    loss = -(torch.stack(logps) * adv).mean() + 0.5 * nn.functional.mse_loss(values, returns)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 10 == 0:
        print(it, sum(rews))
