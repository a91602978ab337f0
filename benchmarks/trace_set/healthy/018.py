# torch.compile with backend aot_eager on a small MLP
import torch
from torch import nn

torch.manual_seed(0)


class MLP(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        for l in self.layers[:-1]:
            x = nn.functional.relu(l(x))
        return self.layers[-1](x)


raw = MLP([10, 32, 32, 1])
model = torch.compile(raw, backend="aot_eager")
opt = torch.optim.SGD(raw.parameters(), lr=0.02, momentum=0.9, nesterov=True)
X = torch.randn(640, 10)
Y = X[:, :2].prod(1, keepdim=True)
for ep in range(3):
    for i in torch.randperm(640).split(32):
        opt.zero_grad()
        loss = (model(X[i]) - Y[i]).pow(2).mean()
        loss.backward()
        opt.step()
    print(ep, loss.item())
