# Sign-SGD custom optimizer subclass of torch.optim.Optimizer
import torch
from torch.optim import Optimizer


class SignSGD(Optimizer):
    def __init__(self, params, lr=1e-3, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["m"] = torch.zeros_like(p)
                st["m"].mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                p.add_(st["m"].sign(), alpha=-group["lr"])
        return loss


torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
opt = SignSGD(m.parameters(), lr=2e-3)
sched = torch.optim.lr_scheduler.StepLR(opt, step_size=30, gamma=0.5)
for k in range(60):
    x = torch.randn(48, 10)
    y = x[:, :3].argmax(1)
    opt.zero_grad()
    loss = torch.nn.functional.cross_entropy(m(x), y)
    loss.backward()
    opt.step()
    sched.step()
    if k % 15 == 0:
        print(k, loss.item())
