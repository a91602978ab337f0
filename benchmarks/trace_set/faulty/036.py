# Parameters in a plain python list are not registered
# fault: `self.blocks = [Block(d) for _ in range(3)]` is a plain list, so the blocks' parameters are not registered and never trained
import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class Stack(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.stem = nn.Linear(10, d)
        self.blocks = [Block(d) for _ in range(3)]
        self.out = nn.Linear(d, 3)

    def forward(self, x):
        h = self.stem(x)
        for b in self.blocks:
            h = b(h)
        return self.out(h)


torch.manual_seed(0)
model = Stack()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(50):
    x = torch.randn(32, 10)
    y = (x[:, :3] * x[:, 3:6]).argmax(1)
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
