# Annealed gradient noise added to .grad before step
import torch

torch.manual_seed(0)
eta, gamma = 0.01, 0.55
net = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(10, 10), torch.nn.Tanh())], torch.nn.Linear(10, 2))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for t in range(60):
    x = torch.randn(32, 10)
    y = (x[:, 0] + x[:, 1] > 0).long()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    std = (eta / (1 + t) ** gamma) ** 0.5
    for p in net.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=std)  # Neelakantan et al. 2015
    opt.step()
    if t % 20 == 0:
        print(t, std, loss.item())
