# PPO on a toy continuous task, several epochs over one rollout
import torch
from torch import nn
from torch.distributions import Normal

torch.manual_seed(0)


class AC(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.zeros(()))
        self.v = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def dist(self, s):
        return Normal(self.mu(s).squeeze(-1), self.log_std.exp())


def rollout(ac, n=128):
    """point mass on a line, push it to 0; one long non-ending episode"""
    S, A, R, V, LP = [], [], [], [], []
    s = torch.randn(2)
    with torch.no_grad():
        for _ in range(n):
            d = ac.dist(s)
            a = d.sample()
            S.append(s), A.append(a), LP.append(d.log_prob(a)), V.append(ac.v(s).squeeze())
            vel = 0.9 * s[1] + 0.1 * a.clamp(-2, 2)
            s = torch.stack([s[0] + 0.1 * vel, vel])
            R.append(-(s[0] ** 2).clamp(max=4.0))
        last = ac.v(s).squeeze()
    adv, g = torch.zeros(n), 0.0
    for t in reversed(range(n)):
        nxt = last if t == n - 1 else V[t + 1]
        g = R[t] + 0.95 * nxt - V[t] + 0.95 * 0.9 * g
        adv[t] = g
    V = torch.stack(V)
    return torch.stack(S), torch.stack(A), torch.stack(LP), adv, adv + V


ac = AC()
opt = torch.optim.Adam(ac.parameters(), lr=3e-3)
for it in range(4):
    S, A, LP, adv, ret = rollout(ac)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    for _ in range(4):
        for i in torch.randperm(len(S)).split(32):
            d = ac.dist(S[i])
            ratio = (d.log_prob(A[i]) - LP[i]).exp()
            pg = -torch.min(ratio * adv[i], ratio.clamp(0.8, 1.2) * adv[i]).mean()
            vl = (ac.v(S[i]).squeeze(-1) - ret[i]).pow(2).mean()
            loss = pg + 0.5 * vl - 0.01 * d.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(ac.parameters(), 0.5)
            opt.step()
    print(it, "return", ret.mean().item(), "vl", vl.item())
