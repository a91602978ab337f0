# Direct preference optimisation with frozen reference copy
import copy
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
V, P, R, BETA = 24, 4, 6, 0.1


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.g, self.o = nn.Embedding(V, 24), nn.GRU(24, 32, batch_first=True), nn.Linear(32, V)

    def forward(self, t):
        return self.o(self.g(self.e(t))[0])


def response_logp(model, prompt, resp):
    ids = torch.cat([prompt, resp], 1)
    lp = model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return lp[:, P - 1:].sum(1)  # only the tokens of the answer


policy = LM()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
opt = torch.optim.AdamW(policy.parameters(), lr=3e-3)
for step in range(40):
    prompt = torch.randint(0, V, (32, P))
    chosen = (prompt[:, -1:] + 1 + torch.arange(R)) % V
    rejected = torch.randint(0, V, (32, R))
    with torch.no_grad():
        ref_c, ref_r = response_logp(reference, prompt, chosen), response_logp(reference, prompt, rejected)
    pol_c, pol_r = response_logp(policy, prompt, chosen), response_logp(policy, prompt, rejected)
    margin = BETA * ((pol_c - ref_c) - (pol_r - ref_r))
    loss = -F.logsigmoid(margin).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item(), (margin > 0).float().mean().item())
