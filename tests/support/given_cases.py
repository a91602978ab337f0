"""Small trainings whose losses are given wrong values, whose parameters a script updates itself, or whose data sets
share a setting; each with a similar correct program, and correct programs that come close.

In: torch. Out: functions, by the code of the expected finding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset, random_split

from support.answer_cases import trained

STEPS = 6


def net(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 17), nn.Tanh(), nn.Linear(17, outputs))


def rows(count: int = 16) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 6)
    return x, x.sum(1) + 0.1 * torch.randn(count)


def updated(model: nn.Module, loss_of: Callable[[], Tensor], clear: bool = True, sign: float = -1.0) -> None:
    for _ in range(STEPS):
        loss_of().backward()
        for p in model.parameters():
            p.data += sign * 0.01 * p.grad
            if clear:
                p.grad.zero_()


def squared(model: nn.Module) -> Tensor:
    x, y = rows()
    return functional.mse_loss(model(x)[:, 0], y)


# -- losses ------------------------------------------------------------------------------------------------------------


def values_for_ctc(wrong: bool) -> None:
    model, few = nn.Linear(8, 6), torch.full((4,), 20)

    def loss_of(_: int) -> Tensor:
        scores = model(torch.randn(20, 4, 8))
        scores = scores if wrong else scores.log_softmax(2)
        return functional.ctc_loss(scores, torch.randint(1, 6, (4, 5)), few, few // 4)

    trained(model, loss_of)


def a_loss_by_hand(wrong: bool) -> None:
    model = net(6, 2)

    def loss_of(_: int) -> Tensor:
        x, y = rows()
        mean, log = model(x).chunk(2, 1)
        return (log + (y.reshape(*([16] if wrong else [16, 1])) - mean) ** 2 / log.exp()).mean()

    trained(model, loss_of)


def a_distribution(wrong: bool) -> None:
    model = net(6, 1)

    def loss_of(_: int) -> Tensor:
        x, y = rows()
        rate = functional.softplus(model(x)) if wrong else functional.softplus(model(x)).squeeze(1)
        return (rate - y.abs().round() * rate.log()).mean()

    trained(model, loss_of)


def weights_of_other_classes(wrong: bool) -> None:
    counts = torch.tensor([48, 6, 3, 24])
    model, weights = net(6, 4), 81 / (4.0 * counts)

    def loss_of(_: int) -> Tensor:
        y = torch.repeat_interleave(torch.arange(4), counts)
        return functional.cross_entropy(model(torch.randn(81, 6)), y, weight=weights.roll(1) if wrong else weights)

    trained(model, loss_of, 6)


def an_activation_before_cross_entropy(wrong: bool) -> None:
    model = nn.Sequential(net(6, 4), nn.Sigmoid() if wrong else nn.Identity())

    def loss_of(_: int) -> Tensor:
        x, _y = rows()
        return functional.cross_entropy(model(x), x[:, :4].argmax(1))

    trained(model, loss_of)


def signs_of_pairs(wrong: bool) -> None:
    model = net(6, 8)

    def loss_of(_: int) -> Tensor:
        same = torch.arange(32) % 2
        return functional.cosine_embedding_loss(
            model(torch.randn(32, 6)), model(torch.randn(32, 6)), same if wrong else 2 * same - 1
        )

    trained(model, loss_of)


def targets_of_a_divergence(wrong: bool) -> None:
    model = net(6, 4)

    def loss_of(_: int) -> Tensor:
        targets = torch.randn(16, 4)
        targets = targets.sigmoid() if wrong else targets.softmax(1)
        return functional.kl_div(model(torch.randn(16, 6)).log_softmax(1), targets, reduction="batchmean")

    trained(model, loss_of)


def logarithms_of_a_divergence(wrong: bool) -> None:
    model = net(6, 4)

    def loss_of(_: int) -> Tensor:
        targets = torch.randn(16, 4).softmax(1)
        own = model(torch.randn(16, 6)).log_softmax(1)
        return functional.kl_div(own, targets if wrong else targets.log(), reduction="batchmean", log_target=True)

    trained(model, loss_of)


def a_table(model: nn.Module, ids_of: Callable[[], Tensor]) -> None:
    trained(model, lambda _: functional.cross_entropy(model(ids_of()), torch.randint(2, (32,))))


def a_start_token_twice(wrong: bool) -> None:
    model = nn.Sequential(nn.Embedding(40, 4), nn.Flatten(), nn.Linear(40, 2))

    def ids_of() -> Tensor:
        ids = torch.randint(3, 40, (32, 10))
        ids[:, : 2 if wrong else 1] = 1
        return ids

    a_table(model, ids_of)


# -- updates by hand ---------------------------------------------------------------------------------------------------


def gradients_by_hand_that_stay(wrong: bool) -> None:
    model = net(6, 1)
    updated(model, lambda: squared(model), clear=not wrong)


def an_ascent_by_hand(wrong: bool) -> None:
    model = net(6, 1)
    updated(model, lambda: squared(model), sign=1.0 if wrong else -1.0)


def a_softmax_before_updates_by_hand(wrong: bool) -> None:
    model = nn.Sequential(net(6, 3), nn.Softmax(1) if wrong else nn.Identity())
    weights = list(model.parameters())
    for _ in range(STEPS):
        x, _y = rows()
        slopes = torch.autograd.grad(functional.cross_entropy(model(x), x[:, :3].argmax(1)), model.parameters())
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight -= 0.05 * slope


# -- a setting of a split data set -------------------------------------------------------------------------------------


class Noisy(Dataset):
    def __init__(self, train: bool, transform: Any = None) -> None:
        self.x, self.train, self.transform, self.ready = torch.randn(40, 6), train, transform, False

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.ready = True
        x = self.x[i] + 0.1 * torch.randn(6) if self.train else self.x[i]
        return x if self.transform is None else self.transform(x), i % 3


def passes(one: Dataset, other: Dataset, before: Callable[[bool], None] = lambda _: None) -> None:
    model = net(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        before(True)
        for x, y in DataLoader(one, 8, shuffle=True):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        before(False)
        with torch.no_grad():
            for x, _y in DataLoader(other, 8):
                model.eval()(x)
        model.train()


def a_setting_of_both_parts(wrong: bool) -> None:
    data = Noisy(True)
    one, other = random_split(data, [32, 8])
    if wrong:
        data.train = False
        passes(one, other)
    else:
        passes(one, other, lambda train: setattr(data, "train", train))


def a_transform_of_both_parts(wrong: bool) -> None:
    data = Noisy(False, torch.neg if wrong else None)
    one, other = Subset(data, range(32)), Subset(data, range(32, 40))
    _ = data[0]
    data.transform = torch.abs
    passes(one, other)


GIVEN: dict[Callable[[bool], None], str] = {
    values_for_ctc: "loss-of-logits",
    a_softmax_before_updates_by_hand: "softmax-twice",
}
GIVEN_SUSPECTED: dict[Callable[[bool], None], str] = {
    a_loss_by_hand: "loss-broadcast",
    a_distribution: "loss-broadcast",
    weights_of_other_classes: "weights-reversed",
    an_activation_before_cross_entropy: "logits-bounded",
    signs_of_pairs: "target-out-of-range",
    targets_of_a_divergence: "target-out-of-range",
    logarithms_of_a_divergence: "target-out-of-range",
    a_start_token_twice: "start-twice",
    gradients_by_hand_that_stay: "not-zeroed",
    an_ascent_by_hand: "update-ascends",
    a_setting_of_both_parts: "flag-shared",
    a_transform_of_both_parts: "flag-shared",
}


# -- right -------------------------------------------------------------------------------------------------------------


def sets_that_are_compared() -> None:
    model = net(4, 1)

    def loss_of(_: int) -> Tensor:
        made, real = model(torch.randn(16, 4)), torch.randn(16)
        return 2 * (made - real).abs().mean() - (made - made.T).abs().mean()

    trained(model, loss_of)


def as_many_features_as_rows() -> None:
    model = net(16, 1)

    def loss_of(_: int) -> Tensor:
        x = torch.randn(16, 16)
        return ((model(x) - x) ** 2).mean()

    trained(model, loss_of)


def a_ranking_by_hand() -> None:
    model = net(6, 1)

    def loss_of(_: int) -> Tensor:
        x, y = rows()
        score = model(x)
        return (functional.softplus(score.T - score) * (y.unsqueeze(1) > y)).mean()

    trained(model, loss_of)


def values_of_ctc_with_priors_or_a_norm() -> None:
    model, few = nn.Linear(8, 6), torch.full((4,), 20)

    def loss_of(i: int) -> Tensor:
        scores = model(torch.randn(20, 4, 8))
        norm = scores.logsumexp(2).sum(0) if i % 2 else torch.zeros(())
        scores = scores if i % 2 else scores.log_softmax(2) + torch.tensor([0.1, 0.6, 0.6, 0.6, 0.6, 0.6])
        losses = functional.ctc_loss(scores, torch.randint(1, 6, (4, 5)), few, few // 4, reduction="none")
        return (losses + norm).mean()

    trained(model, loss_of, 8)


def two_outcomes() -> None:
    model = net(6, 3)

    def loss_of(_: int) -> Tensor:
        score, share = model(torch.randn(16, 6)), torch.rand(16, 3)
        one = functional.kl_div(functional.logsigmoid(score), share, reduction="batchmean")
        return one + functional.kl_div(functional.logsigmoid(-score), 1 - share, reduction="batchmean")

    trained(model, loss_of)


def gradients_of_inputs() -> None:
    """Control: an attack, example weights and a balance of terms, none of which is an extra loss term."""
    model = net(6, 3)

    def loss_of(_: int) -> Tensor:
        x = torch.randn(16, 6, requires_grad=True)
        losses = functional.cross_entropy(model(x), torch.randint(3, (16,)), reduction="none")
        (slope,) = torch.autograd.grad(losses.sum(), x, retain_graph=True)
        assert type(slope) is Tensor
        weights = slope.norm(dim=1)
        attacked = model((x + 0.1 * slope.sign()).detach()).square().mean()
        shown = losses.mean() + weights.mean()  # nobody trains it
        assert float(shown) > 0
        return (weights / weights.sum() * losses).sum() + attacked * weights.mean()

    trained(model, loss_of)


def gradients_that_decay_by_hand() -> None:
    model = net(6, 1)
    for _ in range(STEPS):
        squared(model).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad *= 0.9


def sums_of_gradients() -> None:
    model = net(6, 1)
    first = [p.detach().clone() for p in model.parameters()]
    for _ in range(STEPS):
        squared(model).backward()
        for p, start in zip(model.parameters(), first, strict=True):
            p.data = start - 0.01 * p.grad


def two_models_by_hand() -> None:
    one, other = net(4, 6), net(6, 1)
    for _ in range(STEPS):
        other.zero_grad()
        (other(one(torch.randn(8, 4)).detach()).mean() - other(torch.randn(8, 6)).mean()).backward()
        for p in other.parameters():
            p.data -= 0.01 * p.grad
        one.zero_grad()
        (-other(one(torch.randn(8, 4))).mean()).backward()
        for p in one.parameters():
            p.data -= 0.01 * p.grad


def parts_accumulated_by_hand() -> None:
    weight = torch.zeros(6, requires_grad=True)
    for _ in range(STEPS):
        for _ in range(3):
            x, y = rows()
            (((x @ weight - y) ** 2).mean() / 3).backward()
        weight = (weight - 0.05 * weight.grad).detach().requires_grad_()


def a_step_within_a_step() -> None:
    model = nn.Linear(6, 1)
    weights = list(model.parameters())
    for _ in range(STEPS):
        slopes = torch.autograd.grad(squared(model), weights, create_graph=True)
        x, y = rows()
        weight, bias = (w - 0.1 * s for w, s in zip(weights, slopes, strict=True))
        outer = torch.autograd.grad(((functional.linear(x, weight, bias)[:, 0] - y) ** 2).mean(), weights)
        with torch.no_grad():
            for w, s in zip(weights, outer, strict=True):
                w -= 0.01 * s


NEAR_GIVEN = (
    sets_that_are_compared,
    as_many_features_as_rows,
    a_ranking_by_hand,
    values_of_ctc_with_priors_or_a_norm,
    two_outcomes,
    gradients_of_inputs,
    gradients_that_decay_by_hand,
    sums_of_gradients,
    two_models_by_hand,
    parts_accumulated_by_hand,
    a_step_within_a_step,
)
