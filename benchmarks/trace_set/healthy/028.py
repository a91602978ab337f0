# WeightedRandomSampler oversampling a rare class
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(0)
y = (torch.rand(800) < 0.08).long()
x = torch.randn(800, 6) + 1.5 * y[:, None]
train_x, train_y, val_x, val_y = x[:600], y[:600], x[600:], y[600:]
count = torch.bincount(train_y, minlength=2).float()
weights = (1.0 / count)[train_y]
sampler = WeightedRandomSampler(weights.double(), num_samples=len(train_y), replacement=True)
loader = DataLoader(TensorDataset(train_x, train_y), batch_size=50, sampler=sampler)
net = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.ReLU(), torch.nn.Linear(24, 2))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
for epoch in range(4):
    net.train()
    for a, b in loader:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(a), b)
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        p = net(val_x).argmax(1)
        recall = [(p[val_y == c] == c).float().mean().item() for c in (0, 1)]
    print(epoch, "recall per class", recall)
