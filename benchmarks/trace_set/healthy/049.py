# Manual SGD with momentum updates under no_grad without torch.optim
import torch

torch.manual_seed(0)
W1 = (torch.randn(9, 32) / 3).requires_grad_()
b1 = torch.zeros(32, requires_grad=True)
W2 = (torch.randn(32, 1) / 6).requires_grad_()
b2 = torch.zeros(1, requires_grad=True)
params = [W1, b1, W2, b2]
vel = [torch.zeros_like(p) for p in params]
X = torch.randn(320, 9)
y = X[:, :3].sum(1, keepdim=True).tanh()
lr, mom = 0.03, 0.9
for epoch in range(5):
    for i in torch.randperm(320).split(32):
        out = torch.relu(X[i] @ W1 + b1) @ W2 + b2
        loss = ((out - y[i]) ** 2).mean()
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for p, g, v in zip(params, grads, vel):
                v.mul_(mom).add_(g)
                p -= lr * v
    print(epoch, loss.item())
