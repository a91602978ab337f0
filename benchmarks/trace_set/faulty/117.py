# NaN loss replaced by nan_to_num and training goes on
# fault: `torch.nan_to_num(loss, nan=0.0)` and `q.grad.nan_to_num_(0.0)` hide the NaN that 0 * log 0 gives in three of four batches, so these batches train nothing and the loss shows as 0
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.Softmax(dim=1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)


def entropy_term(t):
    return -(t * t.log()).sum(1).mean()  # 0 * log 0 = nan for one-hot targets


for step in range(60):
    x = torch.randn(32, 8)
    hard = torch.nn.functional.one_hot(x[:, :4].argmax(1), 4).float()
    soft = hard if step % 4 else 0.9 * hard + 0.025
    p = net(x).clamp_min(1e-7)
    loss = -(soft * p.log()).sum(1).mean() - entropy_term(soft) * p.sum() / len(p)
    loss = torch.nan_to_num(loss, nan=0.0)
    opt.zero_grad()
    loss.backward()
    for q in net.parameters():
        q.grad.nan_to_num_(0.0)
    opt.step()
    if step % 12 == 0:
        print(step, loss.item())
