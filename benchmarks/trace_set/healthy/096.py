# Overfit-one-batch sanity check before the true training, with a fresh model after
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build():
    torch.manual_seed(5)
    m = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 4))
    return m, torch.optim.Adam(m.parameters(), lr=1e-2)


torch.manual_seed(0)
x = torch.randn(400, 7)
y = x[:, :4].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=25, shuffle=True)
ce = nn.CrossEntropyLoss()

# sanity check: can the network fit one batch?
m, o = build()
bx, by = next(iter(loader))
for _ in range(30):
    o.zero_grad()
    l = ce(m(bx), by)
    l.backward()
    o.step()
assert l.item() < 0.7, "model can't even fit one batch"

# the true run starts anew
m, o = build()
for epoch in range(2):
    for bx, by in loader:
        o.zero_grad()
        l = ce(m(bx), by)
        l.backward()
        o.step()
    print(epoch, l.item())
