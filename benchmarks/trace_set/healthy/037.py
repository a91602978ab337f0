# Gaussian noise injection on inputs in training only
import torch
from torch import nn


class GaussianNoise(nn.Module):
    def __init__(self, sigma):
        super().__init__()
        self.sigma = sigma

    def forward(self, x):
        return x + self.sigma * torch.randn_like(x) if self.training else x


torch.manual_seed(0)
clean = torch.sigmoid(2 * torch.randn(500, 4) @ torch.randn(4, 16))
ae = nn.Sequential(GaussianNoise(0.2), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16), nn.Sigmoid())
opt = torch.optim.Adam(ae.parameters(), lr=5e-3)
train, held = clean[:400], clean[400:]
for epoch in range(4):
    ae.train()
    for b in torch.randperm(400).split(40):
        opt.zero_grad()
        loss = nn.functional.binary_cross_entropy(ae(train[b]), train[b])
        loss.backward()
        opt.step()
    ae.eval()
    with torch.no_grad():
        print(epoch, nn.functional.mse_loss(ae(held), held).item())
