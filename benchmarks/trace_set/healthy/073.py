# ReduceLROnPlateau stepped with validation loss after each epoch
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

torch.manual_seed(0)
X = torch.randn(500, 6)
y = X.abs().max(1, keepdim=True).values
model = torch.nn.Sequential(torch.nn.Linear(6, 48), torch.nn.ReLU(), torch.nn.Linear(48, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sched = ReduceLROnPlateau(opt, mode="min", factor=0.5, patience=1)
loss_fn = torch.nn.MSELoss()


def one_epoch(train):
    model.train(train)
    total = 0.0
    rows = torch.randperm(400) if train else torch.arange(400, 500)
    for i in rows.split(50):
        with torch.set_grad_enabled(train):
            loss = loss_fn(model(X[i]), y[i])
        if train:
            opt.zero_grad()
            loss.backward()
            opt.step()
        total += loss.item() * len(i)
    return total / len(rows)


for epoch in range(7):
    tr, va = one_epoch(True), one_epoch(False)
    sched.step(va)
    print(epoch, round(tr, 4), round(va, 4), opt.param_groups[0]["lr"])
