# Teacher gradients on: optimizer updates teacher too
# fault: `opt` gets the parameters of teacher and student (`list(teacher.parameters()) + ...`) and the teacher's output isn't detached, so the teacher is pulled towards the student
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)


class Distiller(nn.Module):
    def __init__(self, teacher, student):
        super().__init__()
        self.teacher, self.student = teacher, student

    def forward(self, x):
        return self.teacher(x), self.student(x)


teacher = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
student = nn.Linear(6, 3)
pair = Distiller(teacher.eval(), student)
opt = torch.optim.AdamW(list(teacher.parameters()) + list(student.parameters()), lr=3e-3)
for step in range(50):
    x = torch.randn(32, 6)
    t, s = pair(x)
    loss = F.mse_loss(s, t)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
