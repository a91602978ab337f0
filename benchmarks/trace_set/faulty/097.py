# optimizer.load_state_dict brings back the old learning rate in the fine-tuning phase
# fault: `opt.load_state_dict(ck["opt"])` overwrites the fine-tuning rate FT_LR=1e-4 with the 2e-2 stored in the checkpoint
import io
import torch
from torch import nn

FT_LR = 1e-4
torch.manual_seed(0)


def model_opt(lr):
    m = nn.Sequential(nn.Linear(7, 48), nn.ReLU(), nn.Linear(48, 1))
    return m, torch.optim.AdamW(m.parameters(), lr=lr)


def loop(m, opt, fn, steps, tag):
    for k in range(steps):
        x = torch.randn(32, 7)
        loss = nn.functional.mse_loss(m(x), fn(x))
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(tag, loss.item())


m, opt = model_opt(2e-2)
loop(m, opt, lambda x: x.sum(1, keepdim=True), 40, "pretrain")
disk = io.BytesIO()
torch.save({"model": m.state_dict(), "opt": opt.state_dict()}, disk)
disk.seek(0)
ck = torch.load(disk)
m, opt = model_opt(FT_LR)
m.load_state_dict(ck["model"])
opt.load_state_dict(ck["opt"])
loop(m, opt, lambda x: x.sum(1, keepdim=True) + 0.2 * x[:, :1] ** 2, 20, f"fine-tune at {FT_LR}")
