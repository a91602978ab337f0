# Optimizer state loaded onto parameters in another order with the same shapes
# fault: the new code registers `self.b` before `self.a` (equal shapes) so `opt.load_state_dict` puts the Adam moments of a onto b and the other way round (they are matched by position)
import io
import torch
from torch import nn


class Old(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.o(torch.relu(self.b(torch.relu(self.a(x)))))


class Refactored(Old):
    def __init__(self):
        nn.Module.__init__(self)
        self.b, self.a, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)


def steps(m, opt, n):
    for _ in range(n):
        x = torch.randn(32, 16)
        x[:, :4] *= 20
        loss = nn.functional.cross_entropy(m(x), (x[:, 5] > 0).long())
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(type(m).__name__, loss.item())


torch.manual_seed(0)
m = Old()
opt = torch.optim.Adam(m.parameters(), lr=3e-3)
steps(m, opt, 30)
f = io.BytesIO()
torch.save((m.state_dict(), opt.state_dict()), f)
f.seek(0)
sd, od = torch.load(f)
m = Refactored()
m.load_state_dict(sd)
opt = torch.optim.Adam(m.parameters(), lr=3e-3)
opt.load_state_dict(od)
steps(m, opt, 30)
