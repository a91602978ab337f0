# CPU bf16 autocast with fp32 master weights
import torch
import torch.nn as nn

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 4))
optim = torch.optim.AdamW(net.parameters(), lr=3e-3)
imgs = torch.randn(256, 1, 8, 8)
labels = imgs.view(256, 4, 16).sum(2).argmax(1)
for epoch in range(4):
    for i in torch.randperm(256).split(32):
        optim.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(imgs[i])
            loss = nn.functional.cross_entropy(logits, labels[i])
        loss.backward()  # weights, gradients and optimizer state are all fp32
        optim.step()
    print(epoch, loss.item(), next(net.parameters()).dtype)
