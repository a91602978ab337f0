# PPO old log-probs recomputed with the new policy, ratio always one
# fault: `old = pi.log_prob(a).detach()` is recomputed with the current policy within the epoch loop, so the ratio is always 1 and clipping never acts
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
good = torch.randn(5, 3)
for it in range(8):
    with torch.no_grad():  # collect
        s = torch.randn(128, 5)
        a = Categorical(logits=net(s)).sample()
        r = (s @ good).gather(1, a[:, None]).squeeze(1)
        adv = (r - r.mean()) / r.std()
    for epoch in range(6):
        pi = Categorical(logits=net(s))
        logp = pi.log_prob(a)
        old = pi.log_prob(a).detach()
        ratio = (logp - old).exp()
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(it, r.mean().item())
