# DDP with two losses of two batches summed for a single backward
# run: torchrun --standalone --nproc_per_node 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Wrapper(torch.nn.Module):
    """one forward for two batches so that DDP sees a single forward and a single backward"""

    def __init__(self):
        super().__init__()
        self.f = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh())
        self.a, self.b = torch.nn.Linear(24, 1), torch.nn.Linear(24, 3)

    def forward(self, x1, x2):
        return self.a(self.f(x1)), self.b(self.f(x2))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = DDP(Wrapper())
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(1234 + dist.get_rank())
    for step in range(40):
        x1, x2 = torch.randn(16, 6, generator=g), torch.randn(48, 6, generator=g)
        r, c = net(x1, x2)
        total = F.mse_loss(r, x1.mean(1, keepdim=True)) + F.cross_entropy(c, x2[:, :3].argmax(1))
        opt.zero_grad()
        total.backward()
        opt.step()
    print(dist.get_rank(), total.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
