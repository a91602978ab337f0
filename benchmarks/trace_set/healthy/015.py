# LBFGS with closure on least squares
import torch

torch.manual_seed(0)
A = torch.randn(100, 6, dtype=torch.float64)
b = A @ torch.randn(6, 1, dtype=torch.float64) + 0.01 * torch.randn(100, 1, dtype=torch.float64)
lin = torch.nn.Linear(6, 1).double()
opt = torch.optim.LBFGS(lin.parameters(), lr=1.0, max_iter=5, line_search_fn="strong_wolfe")


def closure():
    opt.zero_grad()
    loss = torch.nn.functional.mse_loss(lin(A), b)
    loss.backward()
    return loss


for k in range(10):
    print(k, float(opt.step(closure)))
