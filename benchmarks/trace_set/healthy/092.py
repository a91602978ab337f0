# Pseudo-labelling with confidence threshold, labels without grad
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
mu = torch.randn(3, 6) * 2


def draw(n):
    y = torch.randint(0, 3, (n,))
    return mu[y] + torch.randn(n, 6), y


lx, ly = draw(30)
ux, _ = draw(480)
vx, vy = draw(150)
net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, nesterov=True)
THRESH = 0.9
for epoch in range(4):
    for (u,) in DataLoader(TensorDataset(ux), 48, shuffle=True):
        b = torch.randint(0, 30, (16,))
        sup = F.cross_entropy(net(lx[b]), ly[b])
        with torch.no_grad():
            conf, pseudo = net(u + 0.05 * torch.randn_like(u)).softmax(1).max(1)  # weak view
        strong = u + 0.5 * torch.randn_like(u)
        unsup = (F.cross_entropy(net(strong), pseudo, reduction="none") * (conf >= THRESH)).mean()
        loss = sup + unsup
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        print(epoch, "used", (conf >= THRESH).float().mean().item(), "acc", (net(vx).argmax(1) == vy).float().mean().item())
