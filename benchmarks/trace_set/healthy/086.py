# Prototypical networks, episodic few-shot batches
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
WAY, SHOT, QUERY = 5, 3, 5
classes = torch.randn(40, 16)
train_cls, test_cls = classes[:30], classes[30:]


def episode(pool):
    pick = pool[torch.randperm(len(pool))[:WAY]]
    x = pick[:, None] + 0.7 * torch.randn(WAY, SHOT + QUERY, 16)
    y = torch.arange(WAY).repeat_interleave(QUERY)
    return x[:, :SHOT], x[:, SHOT:].reshape(-1, 16), y


def scores(net, sup, qry):
    proto = net(sup.reshape(-1, 16)).view(WAY, SHOT, -1).mean(1)
    return -torch.cdist(net(qry), proto).pow(2)


net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for it in range(50):
    s, q, y = episode(train_cls)
    loss = F.cross_entropy(scores(net, s, q), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
with torch.no_grad():
    acc = [(scores(net, s, q).argmax(1) == y).float().mean() for s, q, y in (episode(test_cls) for _ in range(10))]
print("novel classes acc", torch.stack(acc).mean().item())
