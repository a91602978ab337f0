# GCN full-batch on a stochastic block graph with train mask and val mask
import torch
from torch import nn

torch.manual_seed(0)
N, C = 120, 3
block = torch.arange(N) % C
p = torch.where(block[:, None] == block[None], 0.2, 0.02)
A = torch.bernoulli(p).triu(1)
A = A + A.T + torch.eye(N)
deg = A.sum(1)
A_hat = A / (deg[:, None] * deg[None]).sqrt()
X = torch.randn(N, 8) + 0.5 * torch.eye(C, 8)[block]
order = torch.randperm(N)
train_mask = torch.zeros(N, dtype=torch.bool)
train_mask[order[:60]] = True
val_mask = torch.zeros(N, dtype=torch.bool)
val_mask[order[60:]] = True


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(8, 16), nn.Linear(16, C)

    def forward(self, a, x):
        h = nn.functional.dropout(torch.relu(a @ self.w1(x)), 0.5, self.training)
        return a @ self.w2(h)


gcn = GCN()
opt = torch.optim.Adam(gcn.parameters(), lr=1e-2, weight_decay=5e-4)
for epoch in range(40):
    gcn.train()
    opt.zero_grad()
    loss = nn.functional.cross_entropy(gcn(A_hat, X)[train_mask], block[train_mask])
    loss.backward()
    opt.step()
    if epoch % 10 == 9:
        gcn.eval()
        with torch.no_grad():
            acc = (gcn(A_hat, X).argmax(1) == block)[val_mask].float().mean()
        print(epoch, loss.item(), acc.item())
