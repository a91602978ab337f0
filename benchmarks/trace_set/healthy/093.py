# Active learning: pool grows by most uncertain each round, model re-initialised
import torch
from torch import nn

torch.manual_seed(0)
X = torch.randn(500, 5)
Y = (X[:, 0] * X[:, 1] > 0).long()
test = torch.arange(400, 500)
labelled = set(range(20))
for rnd in range(5):
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 2))  # from scratch in each round
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    pool = torch.tensor(sorted(labelled))
    for epoch in range(4):
        for i in pool[torch.randperm(len(pool))].split(16):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(X[i]), Y[i])
            loss.backward()
            opt.step()
    with torch.no_grad():
        acc = (net(X[test]).argmax(1) == Y[test]).float().mean().item()
        rest = torch.tensor([i for i in range(400) if i not in labelled])
        p = net(X[rest]).softmax(1)
        entropy = -(p * p.clamp_min(1e-9).log()).sum(1)
    ask = rest[entropy.topk(20).indices].tolist()
    labelled.update(ask)
    print("round", rnd, "labels", len(pool), "test acc", acc)
