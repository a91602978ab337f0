# EMA shadow of weights and buffers swapped in for validation and swapped back
import contextlib
import torch
from torch import nn


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self):
        for k, v in self.model.state_dict().items():
            if v.dtype.is_floating_point:
                self.shadow[k].lerp_(v, 1 - self.decay)
            else:
                self.shadow[k].copy_(v)

    @contextlib.contextmanager
    def applied(self):
        keep = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(self.shadow)
        try:
            yield
        finally:
            self.model.load_state_dict(keep)


torch.manual_seed(0)
X = torch.randn(500, 10)
Y = (X[:, :2].sum(1) > 0).long()
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
ema = EMA(model, 0.9)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    model.train()
    for i in torch.randperm(400).split(40):
        opt.zero_grad()
        nn.functional.cross_entropy(model(X[i]), Y[i]).backward()
        opt.step()
        ema.update()
    model.eval()
    with ema.applied(), torch.no_grad():
        print(epoch, (model(X[400:]).argmax(1) == Y[400:]).float().mean().item())
