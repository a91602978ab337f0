# ignore_index equal to a real class id
# fault: `ignore_index=0` while 0 is the real class "background", so all background pixels give no loss
import torch
from torch import nn

torch.manual_seed(0)


def scene(n):
    img = 0.3 * torch.randn(n, 1, 10, 10)
    mask = torch.zeros(n, 10, 10, dtype=torch.long)
    for i in range(n):
        r, c = torch.randint(0, 6, (2,)).tolist()
        k = int(torch.randint(1, 3, ()))
        img[i, 0, r:r + 4, c:c + 4] += k
        mask[i, r:r + 4, c:c + 4] = k
    return img, mask


unet = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 3, 1))
criterion = nn.CrossEntropyLoss(ignore_index=0)
opt = torch.optim.AdamW(unet.parameters(), lr=5e-3)
for step in range(40):
    img, mask = scene(16)
    opt.zero_grad()
    loss = criterion(unet(img), mask)
    loss.backward()
    opt.step()
    if step % 10 == 0:
        acc = (unet(img).argmax(1) == mask).float().mean().item()
        print(step, loss.item(), acc)
