# Validation rows are part of the training set by overlapping index split
# fault: `val_idx = perm[350:450]` overlaps `train_idx = perm[:400]`, 50 validation rows are trained on
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.manual_seed(0)
ds = TensorDataset(torch.randn(450, 30), torch.randint(0, 2, (450,)))
perm = torch.randperm(450, generator=torch.Generator().manual_seed(1)).tolist()
train_idx = perm[:400]
val_idx = perm[350:450]
train = DataLoader(Subset(ds, train_idx), batch_size=40, shuffle=True)
val = DataLoader(Subset(ds, val_idx), batch_size=50)
model = torch.nn.Sequential(torch.nn.Linear(30, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(5):
    model.train()
    for x, y in train:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        acc = sum((model(x).argmax(1) == y).sum().item() for x, y in val) / len(val_idx)
    print(epoch, "val acc", acc)
