"""Small trainings whose layers, rates, modes or losses contradict themselves, each with a similar correct program.

In: torch. Out: functions, by the code of the expected finding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from support.traced_cases import X, batches, net, sgd, step


class MadeInForward(nn.Module):
    """A layer that is created in the first forward and kept, or created again in each."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.body, self.kept = nn.Linear(12, 16), kept
        self.head: nn.Module | None = None

    def forward(self, x: Tensor) -> Any:
        head = self.head or nn.Linear(16, 3)
        if self.kept:
            self.head = head
        return head(torch.relu(self.body(x)))


def a_layer_made_in_forward(wrong: bool) -> None:
    model = MadeInForward(not wrong)
    if not wrong:
        model(X[:2])
    optimizer = sgd(model)
    for x, y in batches(1):
        step(model, optimizer, x, y)


def constant_weights(wrong: bool) -> None:
    """Right: weights that begin at zero under random ones."""
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))
    for layer in (model[0], model[2]) if wrong else (model[0],):
        nn.init.constant_(layer.weight, 0.1 if wrong else 0.0)  # type: ignore[arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    optimizer = sgd(model)
    for x, y in batches(1):
        step(model, optimizer, x, y)


def backward_twice(wrong: bool) -> None:
    """Right: the first gradient is inspected and cleared."""
    model = net()
    optimizer = sgd(model)
    for x, y in batches(1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        if not wrong:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def clipping_of_nothing(wrong: bool) -> None:
    model = net()
    parameters: Any = model.parameters() if wrong else [*model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for x, y in batches(1):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()


def frozen_parameters_that_move(wrong: bool) -> None:
    """Frozen in mid-run, with zeros for gradients."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for i, (x, y) in enumerate(batches(1)):
        optimizer.zero_grad(set_to_none=not wrong)
        if i == 3:
            model[0].requires_grad_(False)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def one_rate_for_all_groups(wrong: bool) -> None:
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[3].parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    rates: Any = 0.1 if wrong else [0.01, 0.1]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=17)
    for x, y in batches():
        step(model, optimizer, x, y)
        scheduler.step()


def a_part_replaced_after_its_last_gradient(wrong: bool) -> None:
    """The replaced part keeps its last gradient."""
    model = net()
    first = sgd(model)
    for x, y in batches(1):
        step(model, first, x, y)
    later = torch.optim.Adam(model.parameters(), lr=0.01)
    model[3] = nn.Linear(16, 3)
    if not wrong:
        later = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches(1):
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        later.step()


def a_head_replaced_between_phases(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    for x, y in batches(1):
        step(model, optimizer, x, y)
    model[3] = nn.Linear(16, 3)
    if not wrong:
        optimizer.add_param_group({"params": list(model[3].parameters())})
    for x, y in batches(1):
        model.zero_grad()
        step(model, optimizer, x, y)


LAYERS: dict[Callable[[bool], None], str] = {
    a_head_replaced_between_phases: "in-no-optimizer",
    a_layer_made_in_forward: "layers-in-forward",
    constant_weights: "units-alike",
    backward_twice: "backward-twice",
    clipping_of_nothing: "clip-unused",
    frozen_parameters_that_move: "frozen-moves",
    one_rate_for_all_groups: "rates-overwritten",
    a_part_replaced_after_its_last_gradient: "in-no-optimizer",
}


# -- reported under --verbose ------------------------------------------------------------------------------------------


def one_layer_many_times(wrong: bool) -> None:
    layers = [nn.Linear(12, 12)] * 3 if wrong else [nn.Linear(12, 12) for _ in range(3)]
    stack = nn.ModuleList(layers)
    model = nn.Sequential(nn.Sequential(*stack), nn.Linear(12, 3))
    model.layers = stack
    optimizer = sgd(model)
    model.forward = lambda x: model[1](stack[2](stack[1](stack[0](x))))  # type: ignore[method-assign]
    for x, y in batches(1):
        step(model, optimizer, x, y)


def one_block_in_a_sequence(wrong: bool) -> None:
    blocks = [nn.Linear(12, 12)] * 3 if wrong else [nn.Linear(12, 12) for _ in range(3)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(12, 3))
    optimizer = sgd(model)
    for x, y in batches(1):
        step(model, optimizer, x, y)


LAYERS_SUSPECTED: dict[Callable[[bool], None], str] = {
    one_layer_many_times: "one-layer",
    one_block_in_a_sequence: "one-layer",
}
