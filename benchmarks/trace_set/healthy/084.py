# Deep set / point cloud permutation invariant classifier
import torch
from torch import nn

torch.manual_seed(0)


class DeepSet(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.rho = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, pts):
        h = self.phi(pts)
        return self.rho(torch.cat([h.amax(1), h.mean(1)], 1))


def clouds(n, k=24):
    y = torch.randint(0, 3, (n,))
    p = torch.randn(n, k, 3)
    sphere = p / p.norm(dim=2, keepdim=True)
    cube = p.clamp(-0.8, 0.8)
    line = p * torch.tensor([1.0, 0.1, 0.1])
    x = torch.stack([sphere, cube, line])[y, torch.arange(n)]
    return x + 0.02 * torch.randn_like(x), y


train, held = clouds(400), clouds(80)
net = DeepSet()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for ep in range(6):
    for b in torch.randperm(400).split(40):
        x = train[0][b][:, torch.randperm(24)]
        loss = nn.functional.cross_entropy(net(x), train[1][b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        print(ep, (net(held[0]).argmax(1) == held[1]).float().mean().item())
