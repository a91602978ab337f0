# SAM optimizer, two forward/backward passes a step, on an MLP classifier
import torch, torch.nn as nn

class SAM:
    """Sharpness-aware minimisation around a base optimizer."""

    def __init__(self, params, base, rho=0.05):
        self.params = [p for p in params if p.requires_grad]
        self.base, self.rho = base, rho
        self.eps = []

    @torch.no_grad()
    def ascend(self):
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in self.params])) + 1e-12
        self.eps = [p.grad * (self.rho / norm) for p in self.params]
        for p, e in zip(self.params, self.eps):
            p.add_(e)

    @torch.no_grad()
    def descend(self):
        for p, e in zip(self.params, self.eps):
            p.sub_(e)
        self.base.step()


def main():
    torch.manual_seed(3)
    X = torch.randn(512, 16)
    W = torch.randn(16, 3)
    Y = (X @ W).argmax(1)
    net = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 3))
    base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sam = SAM(net.parameters(), base)
    crit = nn.CrossEntropyLoss()
    g = torch.Generator().manual_seed(0)
    for epoch in range(3):
        for idx in torch.randperm(len(X), generator=g).split(32):
            x, y = X[idx], Y[idx]
            base.zero_grad()
            loss = crit(net(x), y)
            loss.backward()
            sam.ascend()
            base.zero_grad()
            crit(net(x), y).backward()
            sam.descend()
        print("epoch", epoch, "loss", loss.item())


if __name__ == "__main__":
    main()
