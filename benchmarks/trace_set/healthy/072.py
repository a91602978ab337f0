# Warmup plus cosine LambdaLR stepped per optimizer step under accumulation
import math
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
ACC, EPOCHS, WARM = 2, 4, 5
ds = TensorDataset(torch.randn(320, 8))
loader = DataLoader(ds, batch_size=16, shuffle=True)
total = EPOCHS * len(loader) // ACC


def schedule(step):
    if step < WARM:
        return (step + 1) / WARM
    p = (step - WARM) / max(1, total - WARM)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, p)))


net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
sched = LambdaLR(opt, schedule)
opt.zero_grad()
steps = 0
for epoch in range(EPOCHS):
    for k, (x,) in enumerate(loader):
        loss = (net(x).squeeze(1) - x.std(1)).pow(2).mean()
        (loss / ACC).backward()
        if k % ACC == ACC - 1:
            opt.step()
            sched.step()
            opt.zero_grad()
            steps += 1
    print(epoch, loss.item(), sched.get_last_lr())
assert steps == total
