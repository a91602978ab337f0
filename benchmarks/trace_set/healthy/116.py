# Object-detection-like loss with dictionary targets and list of variable boxes
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Boxes(Dataset):
    def __init__(self, n):
        self.items = []
        for _ in range(n):
            img, boxes, labels = 0.1 * torch.randn(1, 16, 16), [], []
            for cell in torch.randperm(16)[:int(torch.randint(1, 4, ()))].tolist():  # no two boxes in one cell
                cy, cx = divmod(cell, 4)
                c = int(torch.randint(0, 2, ()))
                img[0, 4 * cy:4 * cy + 4, 4 * cx:4 * cx + 4] += 1.0 + c
                boxes.append([cx, cy])
                labels.append(c)
            self.items.append((img, {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels)}))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(rows):
    return torch.stack([r[0] for r in rows]), [r[1] for r in rows]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 12, 4, stride=4), nn.ReLU(), nn.Conv2d(12, 3, 1))

    def forward(self, images, targets):
        out = self.net(images)  # one cell for each 4x4 patch: objectness and 2 class logits
        obj = torch.zeros(len(images), 4, 4)
        cls = torch.full((len(images), 4, 4), -100)
        for k, t in enumerate(targets):
            x, y = t["boxes"].unbind(1)
            obj[k, y, x] = 1
            cls[k, y, x] = t["labels"]
        return {"loss_obj": nn.functional.binary_cross_entropy_with_logits(out[:, 0], obj),
                "loss_cls": nn.functional.cross_entropy(out[:, 1:], cls, ignore_index=-100)}


torch.manual_seed(0)
loader = DataLoader(Boxes(240), batch_size=12, shuffle=True, collate_fn=collate)
model = Detector()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    for images, targets in loader:
        losses = model(images, targets)
        loss = sum(losses.values())
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, {k: v.item() for k, v in losses.items()})
