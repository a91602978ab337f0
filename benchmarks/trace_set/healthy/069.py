# Accelerate with two processes prepared dataloader and gather_for_metrics
# run: torchrun --standalone --nproc_per_node 2
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    acc = Accelerator(cpu=True)
    set_seed(8)
    x = torch.randn(450, 6)
    y = (x[:, :3].sum(1) > 0).long()
    train = DataLoader(TensorDataset(x[:400], y[:400]), batch_size=25, shuffle=True)
    val = DataLoader(TensorDataset(x[400:447], y[400:447]), batch_size=8)  # 47 rows: the last batch is padded
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.ReLU(), torch.nn.Linear(24, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, opt, train, val = acc.prepare(model, opt, train, val)
    for epoch in range(3):
        model.train()
        for a, b in train:
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(a), b)
            acc.backward(loss)
            opt.step()
        model.eval()
        good = total = 0
        for a, b in val:
            with torch.no_grad():
                p = model(a).argmax(-1)
            p, b = acc.gather_for_metrics((p, b))
            good += (p == b).sum().item()
            total += len(b)
        acc.print(epoch, good / total, total)
    acc.end_training()


if __name__ == "__main__":
    main()
