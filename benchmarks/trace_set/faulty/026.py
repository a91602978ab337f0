# BatchNorm in gradient accumulation with micro batches of two rows
# fault: `micro = x.split(2)` feeds BatchNorm with two rows at a time; the accumulated gradient is far from that of the batch of 32 and the running statistics are of pairs
import torch
import torch.nn as nn

torch.manual_seed(0)
net = nn.Sequential(nn.Conv1d(3, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 16, 3, padding=1),
                    nn.BatchNorm1d(16), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(30):
    y = torch.randint(0, 4, (32,))
    x = torch.randn(32, 3, 12) * (1 + y[:, None, None].float())
    opt.zero_grad()
    micro = x.split(2)
    for xb, yb in zip(micro, y.split(2)):
        loss = nn.functional.cross_entropy(net(xb), yb) / len(micro)
        loss.backward()
    opt.step()
net.eval()
with torch.no_grad():
    print("eval loss", nn.functional.cross_entropy(net(x), y).item())
