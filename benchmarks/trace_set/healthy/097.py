# Backward called twice with retain_graph for two heads before one step
import torch
from torch import nn

torch.manual_seed(0)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, 40), nn.ReLU())
        self.age, self.sex = nn.Linear(40, 1), nn.Linear(40, 2)

    def forward(self, x):
        h = self.trunk(x)
        return self.age(h).squeeze(1), self.sex(h)


net = Shared()
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
for step in range(50):
    x = torch.randn(32, 9)
    age, sex = net(x)
    loss_age = nn.functional.l1_loss(age, x[:, :4].sum(1))
    loss_sex = nn.functional.cross_entropy(sex, (x[:, 5] > 0).long())
    opt.zero_grad()
    loss_age.backward(retain_graph=True)
    loss_sex.backward()  # adds to the trunk's gradient, as the sum of both losses would
    opt.step()
    if step % 10 == 0:
        print(step, loss_age.item(), loss_sex.item())
