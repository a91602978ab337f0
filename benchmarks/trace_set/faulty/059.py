# CutMix label weights inverted
# fault: after the box is cut, `lam` should be the kept area share; `loss = (1 - lam) * ce(out, y) + lam * ce(out, y2)` has the two labels' weights inverted
import torch
from torch import nn

torch.manual_seed(0)
S = 12


def cutmix(img, y):
    perm = torch.randperm(len(img))
    w = int(torch.randint(2, 7, ()))
    r, c = (int(torch.randint(0, S - w + 1, ())) for _ in range(2))
    img = img.clone()
    img[:, :, r:r + w, c:c + w] = img[perm][:, :, r:r + w, c:c + w]
    lam = 1 - w * w / (S * S)  # share of the first image
    return img, y, y[perm], lam


pat = torch.randn(5, 1, S, S)
net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(200, 5))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
ce = nn.CrossEntropyLoss()
for step in range(50):
    lab = torch.randint(0, 5, (32,))
    x, y, y2, lam = cutmix(pat[lab] + 0.5 * torch.randn(32, 1, S, S), lab)
    out = net(x)
    loss = (1 - lam) * ce(out, y) + lam * ce(out, y2)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item(), lam)
