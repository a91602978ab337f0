# Custom autograd Function with right backward checked by gradcheck
import torch


class SoftSignSquare(torch.autograd.Function):
    """f(x) = x * |x| / (1 + |x|)"""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.abs() / (1 + x.abs())

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        a = x.abs()
        # d/da a^2/(1+a) = (2a + a^2) / (1+a)^2, an even function of x
        return g * (2 * a + a * a) / (1 + a) ** 2


class Act(torch.nn.Module):
    def forward(self, x):
        return SoftSignSquare.apply(x)


torch.manual_seed(0)
probe = (torch.randn(20, dtype=torch.float64) + 0.05).requires_grad_()
assert torch.autograd.gradcheck(SoftSignSquare.apply, probe)
net = torch.nn.Sequential(torch.nn.Linear(6, 32), Act(), torch.nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
X = torch.randn(400, 6)
Y = X.pow(2).mean(1, keepdim=True)
for ep in range(4):
    for i in torch.randperm(400).split(40):
        opt.zero_grad()
        loss = (net(X[i]) - Y[i]).pow(2).mean()
        loss.backward()
        opt.step()
    print(ep, loss.item())
