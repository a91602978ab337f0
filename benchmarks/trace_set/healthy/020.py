# LoRA by hand with scaled low rank adapters on a frozen linear stack
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r=4, alpha=8):
        super().__init__()
        self.base = base
        for p in base.parameters():
            p.requires_grad = False
        self.A = nn.Parameter(torch.empty(r, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)


torch.manual_seed(0)
pretrained = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 6))
for i, l in enumerate(pretrained):
    if isinstance(l, nn.Linear):
        pretrained[i] = LoRALinear(l)
trainable = [p for p in pretrained.parameters() if p.requires_grad]
opt = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)
X = torch.randn(480, 16)
Y = X[:, :6].abs().argmax(1)
for ep in range(3):
    for i in torch.randperm(480).split(24):
        loss = F.cross_entropy(pretrained(X[i]), Y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(ep, loss.item())
