# Distillation from an eval-mode teacher with temperature squared KL
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
x = torch.randn(600, 12)
y = (x @ torch.randn(12, 5)).argmax(1)


def mlp(h, p=0.0):
    return nn.Sequential(nn.Linear(12, h), nn.ReLU(), nn.Dropout(p), nn.Linear(h, 5))


def epochs(n):
    for _ in range(n):
        yield from torch.randperm(600).split(40)


teacher = mlp(128, 0.2)
topt = torch.optim.Adam(teacher.parameters(), lr=5e-3)
for i in epochs(3):
    topt.zero_grad()
    F.cross_entropy(teacher(x[i]), y[i]).backward()
    topt.step()

teacher.eval()
student = mlp(16)
sopt = torch.optim.Adam(student.parameters(), lr=1e-2)
T, alpha = 4.0, 0.7
for i in epochs(3):
    with torch.inference_mode():
        soft = F.softmax(teacher(x[i]) / T, dim=1)
    out = student(x[i])
    kd = F.kl_div(F.log_softmax(out / T, dim=1), soft.clone(), reduction="batchmean") * T * T
    loss = alpha * kd + (1 - alpha) * F.cross_entropy(out, y[i])
    sopt.zero_grad()
    loss.backward()
    sopt.step()
print("student loss", loss.item())
