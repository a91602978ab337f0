# Mean teacher with EMA weights and a consistency loss on unlabelled rows
import copy
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
N_LAB, N_UNL = 64, 512
centers = torch.randn(4, 10) * 2


def make(n):
    y = torch.randint(0, 4, (n,))
    return centers[y] + torch.randn(n, 10), y


xl, yl = make(N_LAB)
xu, _ = make(N_UNL)
xv, yv = make(200)
student = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4))
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad_(False)
opt = torch.optim.AdamW(student.parameters(), lr=3e-3)
lab = DataLoader(TensorDataset(xl, yl), batch_size=16, shuffle=True)
unl = DataLoader(TensorDataset(xu), batch_size=64, shuffle=True, drop_last=True)


@torch.no_grad()
def ema_update(step, decay=0.95):
    d = min(decay, (1 + step) / (10 + step))
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(d).add_(s, alpha=1 - d)


step = 0
for epoch in range(4):
    student.train()
    teacher.train()  # the mean-teacher paper keeps dropout noise in the teacher
    lab_it = iter(lab)
    for (u,) in unl:
        try:
            x, y = next(lab_it)
        except StopIteration:
            lab_it = iter(lab)
            x, y = next(lab_it)
        sup = F.cross_entropy(student(x), y)
        with torch.no_grad():
            target = teacher(u + 0.1 * torch.randn_like(u)).softmax(-1)
        pred = student(u + 0.1 * torch.randn_like(u)).softmax(-1)
        w = min(1.0, step / 16)
        loss = sup + w * F.mse_loss(pred, target)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        step += 1
        ema_update(step)
    teacher.eval()
    with torch.no_grad():
        acc = (teacher(xv).argmax(1) == yv).float().mean()
    print(epoch, "teacher acc", round(acc.item(), 3))
