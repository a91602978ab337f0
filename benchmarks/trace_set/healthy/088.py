# Adversarial training by PGD with model gradients cleared
import torch
import torch.nn as nn
import torch.nn.functional as F


def pgd(model, x, y, eps=0.3, alpha=0.1, iters=4):
    was_training = model.training
    model.eval()
    adv = (x + torch.empty_like(x).uniform_(-eps, eps)).detach()
    for _ in range(iters):
        adv.requires_grad_(True)
        loss = F.cross_entropy(model(adv), y)
        g = torch.autograd.grad(loss, adv)[0]  # leaves the parameters' .grad alone
        adv = (adv.detach() + alpha * g.sign())
        adv = torch.max(torch.min(adv, x + eps), x - eps)
    model.train(was_training)
    return adv.detach()


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
X = torch.randn(480, 10)
Y = X[:, :3].argmax(1)
for epoch in range(3):
    net.train()
    for i in torch.randperm(400).split(40):
        adv = pgd(net, X[i], Y[i])
        opt.zero_grad()
        loss = F.cross_entropy(net(adv), Y[i])
        loss.backward()
        opt.step()
    net.eval()
    va = pgd(net, X[400:], Y[400:])
    with torch.no_grad():
        print(epoch, "clean", (net(X[400:]).argmax(1) == Y[400:]).float().mean().item(),
              "robust", (net(va).argmax(1) == Y[400:]).float().mean().item())
