"""Small trainings whose rates, states, samplers or statistics contradict themselves, each with a similar correct one.

In: torch. Out: functions, by the code of the expected finding.
"""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, WeightedRandomSampler

from support.traced_cases import DATA, X, batches, net, sgd, step


def a_rate_that_nobody_reads(wrong: bool) -> None:
    """Right: the groups' rates follow the attribute."""
    model = net()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(batches()):
        optimizer.lr = 0.1 / (i + 1)  # type: ignore[attr-defined]
        if not wrong:
            optimizer.param_groups[0]["lr"] = optimizer.lr  # type: ignore[attr-defined]
        step(model, optimizer, x, y)


class Momentum(torch.optim.Optimizer):
    """Momentum whose state begins as the gradient itself, or a copy of it."""

    def __init__(self, parameters: object, copies: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})  # type: ignore[arg-type]
        self.copies = copies

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = p.grad.clone() if self.copies else p.grad
            else:
                self.state[p]["momentum_buffer"].mul_(0.9).add_(p.grad)
            p.sub_(self.state[p]["momentum_buffer"], alpha=0.1)


def weights_of_classes(wrong: bool) -> None:
    """Right: weights of rows, some of which are zero."""
    model = net()
    optimizer = sgd(model)
    weights = torch.ones(3) if wrong else (X[:, 0] > 0).float()
    sampler = WeightedRandomSampler(weights.tolist(), len(DATA))
    for x, y in DataLoader(DATA, 12, sampler=sampler):
        step(model, optimizer, x, y)


def an_average_without_statistics(wrong: bool) -> None:
    """Right: statistics are copied; and an untrained model for comparison."""
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    average = copy.deepcopy(model).eval().requires_grad_(False)
    first = copy.deepcopy(average)
    optimizer = sgd(model)
    for _ in range(3):
        for x, y in batches(1):
            step(model, optimizer, x, y)
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new.detach(), 0.1)
        if not wrong:
            for old, new in zip(average.buffers(), model.buffers(), strict=True):
                old.copy_(new)
        with torch.no_grad():
            average(X[:12])
            if not wrong:
                first(X[:12])


def a_state_that_is_the_gradient(wrong: bool) -> None:
    """Right: a copy; and the gradient itself, which a later gradient does not share."""
    for copies, to_none in ((False, False),) if wrong else ((True, False), (False, True)):
        model = net()
        optimizer = Momentum(model.parameters(), copies)
        for x, y in batches(1):
            optimizer.zero_grad(set_to_none=to_none)
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()


STATE: dict[Callable[[bool], None], str] = {
    a_state_that_is_the_gradient: "state-cleared",
    a_rate_that_nobody_reads: "rate-unread",
    weights_of_classes: "rows-unreached",
    an_average_without_statistics: "norms-without-statistics",
}


# -- reported under --verbose ------------------------------------------------------------------------------------------


def an_optimizer_of_both_networks(wrong: bool) -> None:
    one, other = nn.Linear(12, 12), nn.Linear(12, 3)
    model = nn.Sequential(one, other)
    optimizers = [sgd(other, 0.01), sgd(model if wrong else one, 0.01)]
    for x, y in batches(1):
        for optimizer in optimizers:
            step(model, optimizer, x, y)


STATE_SUSPECTED: dict[Callable[[bool], None], str] = {an_optimizer_of_both_networks: "in-two-optimizers"}
