"""Small trainings whose steps are not what they seem: gradients of another loss, memory that is
updated twice, rates that are squared. Each with a similar correct program, and correct programs that are close.

In: torch. Out: functions, by the code of the expected finding.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from support.traced_cases import X, batches, net, sgd, step


def a_generator_left_in_its_discriminator(wrong: bool) -> None:
    """Control: gradients are cleared before the discriminator's loss."""
    maker, judge = nn.Linear(4, 12), nn.Linear(12, 1)
    one, other = sgd(maker, 0.01), sgd(judge, 0.01)
    for x, _ in batches():
        if not wrong:
            other.zero_grad()
        fake = maker(torch.randn(len(x), 4))
        (functional.softplus(-judge(x)).mean() + functional.softplus(judge(fake.detach())).mean()).backward()
        other.step()
        other.zero_grad()
        functional.softplus(-judge(fake)).mean().backward()
        one.step()
        one.zero_grad()


def a_step_left_out(wrong: bool) -> None:
    """A batch has an infinite number. Control: its gradient is cleared."""
    model = net()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(batches(4)):
        if i == 5:
            x = x * math.inf
        functional.cross_entropy(model(x), y).backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()
            optimizer.zero_grad()
        elif not wrong:
            optimizer.zero_grad()


class Tied(nn.Module):
    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, 12)
        if by_data:
            self.other.weight.data = self.one.weight.data
        else:
            self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).relu())


def a_weight_tied_by_data(wrong: bool) -> None:
    """Control: one parameter."""
    model = Tied(wrong)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for x, y in batches():
        step(model, optimizer, x, y)


UPDATES: dict[Callable[[bool], None], str] = {
    a_step_left_out: "gradient-not-cleared",
    a_weight_tied_by_data: "tied-by-data",
}
UPDATES_SUSPECTED: dict[Callable[[bool], None], str] = {
    a_generator_left_in_its_discriminator: "gradient-left",
}


def two_losses_of_a_head() -> None:
    """Correct: both losses train the head, and only the first one the body."""
    body, head = nn.Linear(12, 8), nn.Linear(8, 3)
    one, other = sgd(body, 0.01), sgd(head, 0.01)
    for x, y in batches():
        functional.cross_entropy(head(body(x)), y).backward()
        one.step()
        one.zero_grad()
        functional.cross_entropy(head(body(x + 0.1).detach()), y).backward()
        other.step()
        other.zero_grad()


def rare_steps_of_a_part() -> None:
    """Correct: one optimizer accumulates over two steps of the other; gradients are zeroed through `.data`."""
    body, head = nn.Linear(12, 8), nn.Linear(8, 3)
    one, other = sgd(body, 0.01), sgd(head, 0.01)
    for i, (x, y) in enumerate(batches()):
        functional.cross_entropy(head(body(x)), y).backward()
        one.step()
        one.zero_grad()
        if i % 2:
            other.step()
            for p in head.parameters():
                p.grad.data.zero_()  # type: ignore[union-attr]


def a_critic_cleared_through_data() -> None:
    body, judge = nn.Linear(4, 12), nn.Linear(12, 1)
    one, other = sgd(body, 0.01), sgd(judge, 0.01)
    for x, _ in batches():
        (-judge(body(x[:, :4])).mean()).backward()
        one.step()
        one.zero_grad()
        for p in judge.parameters():
            p.grad.data.zero_()  # type: ignore[union-attr]
        (judge(x).squeeze(1) - x.sum(1)).square().mean().backward()
        other.step()


def backwards_after_the_last_step() -> None:
    """Correct: gradients computed only for inspection, the last one not finite; and a run that ends at a NaN."""
    model = net()
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)
    for _ in range(12):
        model.zero_grad()
        functional.cross_entropy(model(X), X[:, :3].argmax(1)).backward()
    (model(X[:2]) * math.inf).sum().backward()


def a_run_that_ends_in_an_accumulation() -> None:
    model = net()
    optimizer = sgd(model)
    for i, (x, y) in enumerate([*batches(4)][:-1]):
        functional.cross_entropy(model(x * (math.inf if i == 30 else 1)), y).backward()
        if i % 10 == 9:
            optimizer.step()
            optimizer.zero_grad()


def weights_clamped_and_set() -> None:
    model = net()
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad = p.grad.clamp(-1, 1)  # type: ignore[union-attr]
        optimizer.step()
        for p in model.parameters():
            p.data = p.data.clamp(-1, 1)


def parts_of_one_buffer() -> None:
    """Two layers in one buffer, and two with equal values."""
    model = Tied(False)
    memory = torch.randn(288) / 4
    model.other.weight = nn.Parameter(memory[144:].view(12, 12))
    model.one.weight.data = memory[:144].view(12, 12)
    optimizer = sgd(model, 0.01)
    for x, y in batches():
        step(model, optimizer, x, y)


def halves_that_are_added() -> None:
    """Correct: two parameters that share memory: the script adds their gradients, or their updates add up (SGD)."""
    for by_hand in (True, False):
        model = Tied(True)
        optimizer = torch.optim.Adam(model.parameters(), 0.01) if by_hand else sgd(model, 0.01)
        for x, y in batches(1):
            functional.cross_entropy(model(x), y).backward()
            if by_hand:
                model.one.weight.grad += model.other.weight.grad  # type: ignore[operator]
                model.other.weight.grad.zero_()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


def gradients_of_inputs_after_training() -> None:
    """Correct: after training only gradients of inputs are read; gradients of weights overflow."""
    model = net()
    optimizer = sgd(model)
    for x, y in batches(1):
        step(model, optimizer, x, y)
    for _ in range(40):
        x = X[:8].clone().requires_grad_()
        (functional.cross_entropy(model(x), X[:8, :3].argmax(1)) * 3e38).backward()


def an_optimizer_for_each_view() -> None:
    """Correct: two optimizers of parameters that share memory alternate."""
    model = Tied(True)
    optimizers = [sgd(model.one, 0.01), sgd(model.other, 0.01)]
    for x, y in batches():
        for optimizer in optimizers:
            step(model, optimizer, x, y)
        model.zero_grad()


def factors_of_a_rate_of_one() -> None:
    """A schedule of rates with lr=1, a warm-up to the whole rate, and a small rate on purpose."""
    for rate, factor in ((1.0, 0.03), (0.03, 1.0), (0.05, 0.5)):
        model = net()
        optimizer = sgd(model, rate)
        scheduler = LambdaLR(optimizer, lambda i, factor=factor: factor * min((i + 1) / 4, 4 / (i + 1)))  # type: ignore[misc]
        for x, y in batches(1):
            step(model, optimizer, x, y)
            scheduler.step()


NEAR_UPDATES = (
    two_losses_of_a_head,
    rare_steps_of_a_part,
    a_critic_cleared_through_data,
    backwards_after_the_last_step,
    a_run_that_ends_in_an_accumulation,
    weights_clamped_and_set,
    parts_of_one_buffer,
    halves_that_are_added,
    gradients_of_inputs_after_training,
    an_optimizer_for_each_view,
    factors_of_a_rate_of_one,
)
