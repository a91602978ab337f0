# Resume without scheduler state, warm-up starts again
# fault: after the restart `sched` is made anew and its state is not loaded, so the warm-up runs again from zero and the decay is at the wrong step
import io
import torch
from torch.optim.lr_scheduler import LambdaLR

torch.manual_seed(0)
TOTAL, WARM = 60, 10


def lr_lambda(s):
    return (s + 1) / WARM if s < WARM else max(0.0, (TOTAL - s) / (TOTAL - WARM))


def setup(blob=None):
    model = torch.nn.Linear(12, 1)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    start = 0
    if blob is not None:
        blob.seek(0)
        st = torch.load(blob)
        model.load_state_dict(st["model"])
        opt.load_state_dict(st["optimizer"])
        for g in opt.param_groups:
            g["lr"] = g["initial_lr"] = 1e-2
        start = st["step"]
    sched = LambdaLR(opt, lr_lambda)
    return model, opt, sched, start


w = torch.randn(12, 1)
blob = None
for until in (30, 50):  # two jobs, the first is preempted at 30
    model, opt, sched, start = setup(blob)
    for step in range(start, until):
        x = torch.randn(32, 12)
        opt.zero_grad()
        loss = (model(x) - x @ w).pow(2).mean()
        loss.backward()
        opt.step()
        sched.step()
    print(until, loss.item(), sched.get_last_lr())
    blob = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "step": until}, blob)
