# next(iter(loader)) in the loop, same first batch for ever
# fault: `x, y = next(iter(loader))` with shuffle=False builds a new iterator each step, so the same first batch is trained for ever
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(1000, 12)
y = x.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=False)
net = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
MAX_STEPS = 60
for step in range(MAX_STEPS):
    x, y = next(iter(loader))
    opt.zero_grad()
    loss = ((net(x) - y) ** 2).mean()
    loss.backward()
    opt.step()
    if step % 20 == 0:
        print("step", step, "loss", loss.item())
