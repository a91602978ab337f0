"""Healthy training of unusual form, on one process. A check that is too simple would report a fault.

    python variants.py gan|frozen|lbfgs|sparse|average|groups|own-schedule|streamed|second-model|skipped-layers

It imports torch alone.
"""

import copy
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(0)
x = torch.randn(96, 8)
y = x[:, :3].argmax(1)
batches = list(zip(x.split(16), y.split(16), strict=True)) * 2


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def gan() -> None:
    """Two models and two optimizers; the second loss goes through both models."""
    maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, judge)]
    loss = nn.functional.binary_cross_entropy_with_logits
    for real, _ in batches:
        fake = maker(torch.randn(len(real), 4))
        judge.zero_grad()
        loss(judge(real), torch.ones(len(real), 1)).backward()
        loss(judge(fake.detach()), torch.zeros(len(real), 1)).backward()
        optimizers[1].step()
        maker.zero_grad()
        loss(judge(fake), torch.ones(len(real), 1)).backward()
        optimizers[0].step()


def frozen() -> None:
    """The first layer is frozen, and the optimizer holds all parameters."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, labels in batches:
        step(model, optimizer, inputs, labels)


def lbfgs() -> None:
    """A closure that the optimizer calls several times a step."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)


def sparse() -> None:
    """Sparse gradients of an embedding, of which a step uses a few rows."""
    table, head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)
    model = nn.Sequential(table, head)
    optimizers = [torch.optim.SparseAdam(table.parameters(), lr=1e-2), torch.optim.AdamW(head.parameters(), lr=1e-2)]
    for i, (_, labels) in enumerate(batches):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.arange(i, i + len(labels))), labels).backward()
        for optimizer in optimizers:
            optimizer.step()


def average() -> None:
    """A running average of the weights, evaluated after each epoch, and a schedule whose turn comes later."""
    model = net()
    mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    last = torch.optim.swa_utils.SWALR(optimizer, swa_lr=1e-3)
    for i, (inputs, labels) in enumerate(batches):
        step(model, optimizer, inputs, labels)
        mean.update_parameters(model)
        if i % 6 == 5:
            (schedule if i < 60 else last).step()
            mean.eval()
            with torch.no_grad():
                mean(x)


def groups() -> None:
    """Parameter groups of other learning rates, one of them 0 at first, by a schedule of warmup and decay."""
    model = net()
    rows = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(rows, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(n / 3, 1.0) * (1 - n / 40))
    for inputs, labels in batches:
        step(model, optimizer, inputs, labels)
        schedule.step()


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that replaces `step` and sets the rates itself."""

    def step(self, *_: object) -> None:
        self.last_epoch += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * min(self.last_epoch / 20, 1.0)


def own_schedule() -> None:
    """A schedule of the script's own, and one that was made and put away."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    schedule = Warmup(optimizer)
    for inputs, labels in batches:
        step(model, optimizer, inputs, labels)
        schedule.step()


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        yield from list(zip(x, y, strict=True))[number::count]


def streamed() -> None:
    """A stream that its workers share, over two epochs of one order."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for inputs, labels in DataLoader(Stream(), batch_size=16, num_workers=2):
            step(model, optimizer, inputs, labels)


def second_model() -> None:
    """A frozen teacher in evaluation mode beside a pupil."""
    teacher, model = net().eval(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, _ in batches:
        with torch.no_grad():
            wanted = teacher(inputs).softmax(1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), wanted).backward()
        optimizer.step()


def skipped_layers() -> None:
    """Layers that take part in some steps (stochastic depth)."""
    model, extra = net(), nn.Linear(8, 8)
    both = nn.ModuleDict({"net": model, "extra": extra})

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.calls = both, 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.parts["net"](inputs + self.parts["extra"](inputs) if self.calls % 3 else inputs)

    deep = Deep()
    optimizer = torch.optim.AdamW(copy.copy(list(deep.parameters())), lr=1e-2)
    for inputs, labels in batches:
        step(deep, optimizer, inputs, labels)


if __name__ == "__main__":
    globals()[sys.argv[1].replace("-", "_")]()
