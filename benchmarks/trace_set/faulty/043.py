# EMA updated from the EMA model itself, never from the student
# fault: `e.mul_(decay).add_(e, alpha=1 - decay)` in `update_ema` mixes the EMA weight with itself, the student never gets in
import copy
import torch
import torch.nn.functional as F


@torch.no_grad()
def update_ema(ema, model, decay=0.95):
    for e, m in zip(ema.parameters(), model.parameters()):
        e.mul_(decay).add_(e, alpha=1 - decay)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
ema = copy.deepcopy(model).eval().requires_grad_(False)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
vx = torch.randn(100, 5)
vy = vx.norm(dim=1, keepdim=True)
for step in range(60):
    x = torch.randn(32, 5)
    loss = F.mse_loss(model(x), x.norm(dim=1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
    update_ema(ema, model)
    if step % 20 == 19:
        with torch.no_grad():
            print(step, loss.item(), F.mse_loss(ema(vx), vy).item())
