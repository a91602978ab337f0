# Generator of parameters consumed by a counter before the optimizer groups
# fault: `params = model.encoder.parameters()` is a generator that `sum(... for p in params)` uses up, so the encoder's optimizer group is an empty list
import torch
from torch import nn

torch.manual_seed(0)
model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(8, 48), nn.GELU(), nn.Linear(48, 24), nn.GELU()),
                       "decoder": nn.Linear(24, 8)})
params = model.encoder.parameters()
print("encoder size", sum(p.numel() for p in params))
groups = [{"params": list(params), "lr": 1e-3}, {"params": list(model["decoder"].parameters()), "lr": 3e-3}]
opt = torch.optim.Adam(groups)
for step in range(50):
    x = torch.randn(32, 2) @ torch.ones(2, 8).cumsum(1) + 0.1 * torch.randn(32, 8)
    out = model["decoder"](model["encoder"](x))
    loss = nn.functional.mse_loss(out, x)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
