# Hard negative mining triplet loss with margin
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


def batch_hard(emb, labels, margin=0.3):
    d = torch.cdist(emb, emb)
    same = labels[:, None] == labels[None]
    eye = torch.eye(len(labels), dtype=torch.bool)
    hardest_pos = d.masked_fill(~same | eye, 0).amax(1)
    hardest_neg = d.masked_fill(same, float("inf")).amin(1)
    return F.relu(hardest_pos - hardest_neg + margin).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, x):
        return F.normalize(self.f(x), dim=1)


ids = torch.randn(20, 12)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for step in range(50):
    P, K = 8, 4  # people, shots
    who = torch.randperm(20)[:P].repeat_interleave(K)
    x = ids[who] + 0.5 * torch.randn(P * K, 12)
    loss = batch_hard(net(x), who)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
