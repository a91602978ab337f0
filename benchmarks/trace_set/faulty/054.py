# Embedding.from_pretrained freezes by default
# fault: `nn.Embedding.from_pretrained(vectors)` has freeze=True by default though the vectors were meant to be fine-tuned (they are in the optimizer)
import torch
from torch import nn


class TextCNN(nn.Module):
    def __init__(self, vectors, classes):
        super().__init__()
        self.emb = nn.Embedding.from_pretrained(vectors)
        self.conv = nn.Conv1d(vectors.size(1), 24, 3)
        self.fc = nn.Linear(24, classes)

    def forward(self, t):
        h = torch.relu(self.conv(self.emb(t).transpose(1, 2)))
        return self.fc(h.amax(2))


torch.manual_seed(0)
glove = torch.randn(50, 12)
model = TextCNN(glove, 3)
opt = torch.optim.Adam([
    {"params": model.emb.parameters(), "lr": 1e-3},
    {"params": [*model.conv.parameters(), *model.fc.parameters()], "lr": 4e-3},
])
for step in range(50):
    t = torch.randint(0, 50, (32, 12))
    y = (t < 17).sum(1).div(4, rounding_mode="floor").clamp(max=2)
    loss = nn.functional.cross_entropy(model(t), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
