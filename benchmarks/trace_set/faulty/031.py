# Softmax applied before CrossEntropyLoss
# fault: the model ends in `nn.Softmax(dim=1)` and `nn.CrossEntropyLoss` applies log-softmax again, so gradients are squashed
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, n_out), nn.Softmax(dim=1))

    def forward(self, x):
        return self.layers(x)


x = torch.randn(640, 15)
y = x[:, :5].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
clf = Classifier(15, 5)
loss_fn = nn.CrossEntropyLoss()
opt = torch.optim.Adam(clf.parameters(), lr=1e-3)
for e in range(3):
    correct = 0
    for a, b in loader:
        opt.zero_grad()
        out = clf(a)
        loss = loss_fn(out, b)
        loss.backward()
        opt.step()
        correct += (out.argmax(1) == b).sum().item()
    print(e, loss.item(), correct / len(x))
