# DataLoader shuffle missing on class-sorted data
# fault: `DataLoader(train, batch_size=32)` has no shuffle and the rows are sorted by class, so each batch holds one class only
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

torch.manual_seed(0)
parts = []
for c in range(4):  # one file per class, read one after the other
    feats = torch.randn(160, 8) + torch.eye(8)[c] * 2
    parts.append(TensorDataset(feats, torch.full((160,), c)))
train = ConcatDataset(parts)
loader = DataLoader(train, batch_size=32)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    total = 0.0
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / len(loader):.4f}")
