# Layers called via .forward by an old-school author in a plain loop
import torch, torch.nn as nn, torch.optim as optim
torch.manual_seed(1)

class net(nn.Module):
    def __init__(self):
        super(net, self).__init__()
        self.l1 = nn.Linear(2, 30)
        self.l2 = nn.Linear(30, 30)
        self.l3 = nn.Linear(30, 1)
    def forward(self, x):
        h = torch.tanh(self.l1.forward(x))
        h = torch.tanh(self.l2.forward(h))
        return torch.sigmoid(self.l3.forward(h))

n = net()
crit = nn.BCELoss()
o = optim.RMSprop(n.parameters(), lr=0.01)
pts = torch.rand(400, 2) * 2 - 1
lab = ((pts ** 2).sum(1, keepdim=True) < 0.5).float()
i = 0
while i < 50:
    pick = torch.randint(0, 400, (40,))
    o.zero_grad()
    out = n.forward(pts[pick])
    err = crit.forward(out, lab[pick])
    err.backward()
    o.step()
    i += 1
    if i % 10 == 0: print(i, err.item())
