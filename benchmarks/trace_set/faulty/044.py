# EMA model copies by reference (state_dict not cloned) so is the student
# fault: `self.shadow = dict(model.state_dict())` keeps references to the live tensors, so the "EMA" is the student itself and the in-place lerp does nothing
import torch
from torch import nn


class EMA:
    def __init__(self, model, decay=0.98):
        self.decay = decay
        self.shadow = dict(model.state_dict())

    def update(self, model):
        with torch.no_grad():
            for k, v in model.state_dict().items():
                self.shadow[k].mul_(self.decay).add_(v, alpha=1 - self.decay)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
ema = EMA(net)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for it in range(50):
    x = torch.randn(64, 4)
    y = (x.sum(1) > 0).long()
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.update(net)
final = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
final.load_state_dict(ema.shadow)
print(loss.item(), nn.functional.cross_entropy(final(x), y).item())
