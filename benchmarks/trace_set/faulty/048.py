# Teacher in train mode with dropout during distillation
# fault: there is no `teacher.eval()` after the teacher's training, so its soft targets are made with dropout noise and batch statistics
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
X = torch.randn(500, 10)
Y = (X @ torch.randn(10, 4)).argmax(1)
teacher = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))
student = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 4))


def loop(net, lossfn, epochs, lr):
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    net.train()
    for e in range(epochs):
        for i in torch.randperm(500).split(25):
            loss = lossfn(net(X[i]), i)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return loss.item()


loop(teacher, lambda o, i: F.cross_entropy(o, Y[i]), 2, 5e-3)
for p in teacher.parameters():
    p.requires_grad_(False)


def distill(o, i, T=3.0):
    with torch.no_grad():
        t = teacher(X[i])
    return F.kl_div(F.log_softmax(o / T, -1), F.softmax(t / T, -1), reduction="batchmean") * T * T


print(loop(student, distill, 2, 5e-3))
