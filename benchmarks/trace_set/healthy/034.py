# OneCycleLR stepped each batch with total_steps exactly known
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


def main(epochs=4, max_lr=0.05):
    torch.manual_seed(0)
    x = torch.randn(330, 5)
    loader = DataLoader(TensorDataset(x, x.pow(2).mean(1)), batch_size=32, shuffle=True)  # 11 batches, last one short
    net = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.Mish(), torch.nn.Linear(32, 1))
    opt = torch.optim.SGD(net.parameters(), lr=max_lr, momentum=0.95)
    sched = OneCycleLR(opt, max_lr=max_lr, epochs=epochs, steps_per_epoch=len(loader))
    for ep in range(epochs):
        for a, b in loader:
            opt.zero_grad()
            loss = torch.nn.functional.mse_loss(net(a).squeeze(-1), b)
            loss.backward()
            opt.step()
            sched.step()
        print(ep, loss.item(), sched.get_last_lr()[0])


main()
