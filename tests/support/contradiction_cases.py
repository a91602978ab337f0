"""Small trainings that contradict themselves, each with a similar correct program, and correct programs that are close.

In: torch. Out: functions, by the code of the expected finding.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from support.traced_cases import X, batches, net, sgd, step


def squares_of_all_pairs(wrong: bool) -> None:
    """A value loss with a further term. Control: pairs that are weighted."""
    model = nn.Linear(12, 1)
    optimizer = sgd(model, 1e-3)
    for x, _ in batches():
        optimizer.zero_grad()
        value, returns = model(x), x[:, 0]
        squares = (returns - value).pow(2)
        weighted = (squares * torch.eye(len(x))).sum() / len(x)
        (0.5 * (squares.mean() if wrong else weighted) - 0.01 * value.mean()).backward()
        optimizer.step()


def probabilities_in_kl_div(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model, 1e-3)
    for x, y in batches():
        optimizer.zero_grad()
        out = model(x).softmax(-1) if wrong else model(x).log_softmax(-1)
        (0.5 * nn.KLDivLoss(reduction="batchmean")(out, functional.one_hot(y, 3) * 0.7 + 0.1)).backward()
        optimizer.step()


def an_average_instead_of_the_weights(wrong: bool) -> None:
    """Weights are swapped for evaluations. Control: a copy is put back."""
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    for i, (x, y) in enumerate(batches()):
        step(model, optimizer, x, y)
        for p, q in zip(average.parameters(), model.parameters(), strict=True):
            p.lerp_(q.detach(), 0.1)
        if i % 3 == 2:
            state = model.state_dict()
            state = state if wrong else copy.deepcopy(state)
            model.load_state_dict(average.state_dict())
            with torch.no_grad():
                model.eval()(X[:7] + 1)
            model.train().load_state_dict(state)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def frozen_norms(wrong: bool, after_a_pass: bool = False) -> None:
    """Control: they are frozen again after each `train()`."""
    model = Normed()
    model.body[1].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for i in range(3):
        if wrong and not after_a_pass:
            model.body[1].eval()
        model.train()
        if not wrong or (after_a_pass and i == 0):
            model.body[1].eval()
        for x, y in batches(1):
            step(model, optimizer, x, y)
        with torch.no_grad():
            model.eval()(X[:7] + 1)


def norms_frozen_for_one_pass(wrong: bool) -> None:
    frozen_norms(wrong, after_a_pass=True)


class Weighted(nn.Module):
    """Losses weighted by learned numbers, in a list of Python or in one that registers them."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        scales = [nn.Parameter(torch.zeros(())) for _ in range(2)]
        self.inner, self.scales = net(), scales if plain else nn.ParameterList(scales)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scales[0].exp() + self.scales[1]


def numbers_in_a_list(wrong: bool) -> None:
    model = Weighted(wrong)
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)


CONTRADICTIONS: dict[Callable[[bool], None], str] = {
    squares_of_all_pairs: "loss-broadcast",
    probabilities_in_kl_div: "loss-of-probabilities",
    an_average_instead_of_the_weights: "self-load",
    frozen_norms: "norm-not-frozen",
    norms_frozen_for_one_pass: "norm-not-frozen",
    numbers_in_a_list: "unregistered",
}


# -- correct programs --------------------------------------------------------------------------------------------------


def distances_of_all_pairs() -> None:
    """The energy distance of two samples has absolute differences of all pairs."""
    model = nn.Linear(12, 1)
    optimizer = sgd(model, 1e-3)
    for x, _ in batches():
        optimizer.zero_grad()
        out = model(x)
        (2 * (out - x[:, 0]).abs().mean() - (out - out.T).abs().mean()).backward()
        optimizer.step()


def statistics_that_adapt() -> None:
    """Under frozen weights, and a body that is scored by itself before training."""
    model = Normed()
    model.body.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad():
            model.body.eval()(X[:7] + 1)
        model.train()
        for x, y in batches(1):
            step(model, optimizer, x, y)


def numbers_updated_by_hand() -> None:
    """In a list, through `.data`, which torch does not count."""
    model = Weighted(True)
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)
        for scale in model.scales:
            scale.data -= 0.1 * scale.grad
            scale.grad = None


def numbers_learned_later() -> None:
    """Their optimizer steps after a warm-up."""
    model = Weighted(True)
    optimizer, later = sgd(model), torch.optim.Adam(model.scales)
    for i, (x, y) in enumerate(batches(3)):
        step(model, optimizer, x, y)
        if i > 10:
            later.step()
            later.zero_grad()


UNUSUAL = (distances_of_all_pairs, statistics_that_adapt, numbers_updated_by_hand, numbers_learned_later)
