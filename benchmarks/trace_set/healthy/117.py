# GradScaler disabled on CPU kept in the loop for portability, unscale then clip
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
use_amp = device == "cuda"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device, enabled=use_amp)
x, y = torch.randn(480, 10), torch.zeros(480, dtype=torch.long)
y = (x[:, :3] + 0.1).argmax(1)
for epoch in range(3):
    for i in torch.randperm(480).split(40):
        a, b = x[i].to(device), y[i].to(device)
        opt.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16 if use_amp else torch.bfloat16, enabled=use_amp):
            loss = nn.functional.cross_entropy(net(a), b)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
    print(epoch, loss.item())
