"""Small trainings that show a fault in the graph or the settings of their first losses, each with a similar correct
program, and correct programs that come close.

In: torch. Out: functions, by the code of the expected finding.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from support.answer_cases import trained
from support.traced_cases import X, batches, net, sgd, step


class Computed(nn.Module):
    """A module made of parts and of a function of the parts and the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def padded(count: int = 16, length: int = 12) -> tuple[Tensor, Tensor]:
    """Token ids that end in 0, and their lengths."""
    lengths = torch.randint(3, length, (count,))
    lengths[:2] = torch.tensor([length - 1, 4])
    ids = torch.randint(1, 30, (count, length))
    return ids.masked_fill(torch.arange(length) >= lengths.unsqueeze(1), 0), lengths


def weighted_rows() -> Iterator[list[Tensor]]:
    rows = TensorDataset(torch.randn(64, 6), torch.randn(64, 1), torch.rand(64))
    yield from DataLoader(rows, 16, shuffle=True)


def margins(policy: nn.Module, reference: nn.Module) -> Tensor:
    x = torch.randn(8, 2, 4)
    with torch.no_grad():
        other = reference(x)
    chosen, rejected = (policy(x) - other).sum(2).unbind(1)
    return functional.softplus(-0.1 * (chosen - rejected)).mean()


def a_reference_that_is_the_policy(wrong: bool) -> None:
    policy = nn.Linear(4, 3)
    reference = policy if wrong else copy.deepcopy(policy)
    trained(policy, lambda _: margins(policy, reference))


def a_term_of_weight_zero(wrong: bool) -> None:
    """Wrong: a preference that is learned against itself. Right: it begins after a warm-up, its head at zero."""
    policy, head = nn.Linear(4, 3), nn.Linear(3, 1, bias=False)
    nn.init.zeros_(head.weight)
    model = nn.ModuleList([policy, head])

    def loss_of(_: int) -> Tensor:
        x = torch.randn(8, 2, 4)
        values = policy(x).tanh()
        chosen, rejected = (policy(x) - policy(x).detach() if wrong else head(values)).sum(2).unbind(1)
        term = functional.softplus(-(chosen - rejected)).mean()
        return functional.cross_entropy(values[:, 0], x[:, 0].argmax(1) % 3) + (1.0 if wrong else 0.0) * term

    trained(model, loss_of)


# -- proved ------------------------------------------------------------------------------------------------------------


def letters_with_the_blank(wrong: bool) -> None:
    model = nn.Linear(8, 6)

    def loss_of(_: int) -> Tensor:
        targets = torch.randint(0 if wrong else 1, 6, (4, 7))
        targets[:, 4:] = 0  # behind the length
        if not wrong:
            targets[3] = 0  # without a transcript; the loss leaves it out
        scores = model(torch.randn(20, 4, 8)).log_softmax(-1)
        losses = functional.ctc_loss(scores, targets, torch.full((4,), 20), torch.full((4,), 4), reduction="none")
        return losses.mean() if wrong else losses[:3].mean()

    trained(model, loss_of)


def labels_of_a_margin_for_cross_entropy(wrong: bool) -> None:
    model = nn.Linear(8, 3)

    def loss_of(_: int) -> Tensor:
        labels, scores = torch.randint(0, 2, (16, 3)) * 2.0 - 1, model(torch.randn(16, 8))
        if wrong:
            return functional.binary_cross_entropy_with_logits(scores, labels)
        missing = functional.binary_cross_entropy_with_logits(scores, labels, reduction="none") * (labels >= 0)
        hidden = functional.binary_cross_entropy_with_logits(scores.masked_fill(labels < 0, 0), labels)
        pairs = functional.soft_margin_loss(scores, (labels > 0).float())  # 0: no pair
        return missing.mean() + functional.soft_margin_loss(scores, labels) + hidden + pairs

    trained(model, loss_of)


def weights_of_all_pairs(wrong: bool) -> None:
    model = nn.Linear(6, 1)
    rows = weighted_rows()

    def loss_of(_: int) -> Tensor:
        x, y, weights = next(rows)
        if not wrong:
            table = ((torch.outer(weights, weights) - weights * model(x)) ** 2).mean()  # each pair has a term
            return table + (weights.unsqueeze(1) * (model(x) - y) ** 2).mean()
        return (weights * (model(x) - y) ** 2).mean()

    trained(model, loss_of)


def a_module_with_requires_grad(wrong: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    if wrong:
        vars(model[0])["requires_grad"] = False
    else:
        model[0].requires_grad_(False)
        vars(model[1])["requires_grad"] = False
    rates = [{"params": layer.parameters(), "lr": 0.1 if i else 0.01} for i, layer in enumerate(model)]
    if not wrong:  # the attribute may have chosen the rate
        optimizer = torch.optim.SGD(rates)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return
    trained(model, lambda _: model(torch.randn(4, 8)).square().mean())


def a_module_that_stays_frozen(wrong: bool) -> None:
    model = net()
    model[0].requires_grad_(False)
    for phase in range(2):
        optimizer = sgd(model)
        for x, y in batches():
            step(model, optimizer, x, y)
        if phase == 0 and wrong:
            model[0].requires_grad = True  # type: ignore[assignment]
        elif phase == 0:
            model[0].requires_grad_(True)


def factors_of_zero(wrong: bool) -> None:
    def adapt(model: Any, x: Tensor) -> Tensor:
        return model.head(x + functional.linear(functional.linear(x, model.one), model.other))

    model = Computed(adapt, head=nn.Linear(12, 3))
    model.one = nn.Parameter(torch.zeros(4, 12) if wrong else torch.randn(4, 12))
    model.other = nn.Parameter(torch.zeros(12, 4))
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)


def a_norm_of_what_is_left_out(wrong: bool) -> None:
    """The excluded body gets gradients in both programs; the right one clears them."""
    model = net()
    optimizer = sgd(model[3])
    for x, y in batches():
        (optimizer if wrong else model).zero_grad()
        functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def a_class_that_is_copied(wrong: bool) -> None:
    """A class is copied before (wrong) or after the rows are split."""
    rows = TensorDataset(torch.randn(72, 12), torch.arange(72) % 3)
    copies = [*range(72), *list(range(0, 72, 3)) * 4]
    data: Any = Subset(rows, copies) if wrong else rows
    fit, test = random_split(data, [len(data) - 24, 24], generator=torch.Generator().manual_seed(0))
    if not wrong:
        fit = Subset(rows, [i for i in fit.indices for _ in range(1 if i % 3 else 4)])  # type: ignore[assignment]
    model = net()
    optimizer = sgd(model)
    for x, y in batches(2, fit):
        step(model, optimizer, x, y)
    with torch.no_grad():
        for x, _ in DataLoader(test, 12):
            model.eval()(x)


def similarities_times_a_temperature(wrong: bool) -> None:
    """Right: divided; plain similarities; a learned factor; products of vectors of other lengths."""
    model = Computed(lambda model, x: model.layer(x), layer=nn.Linear(12, 6))
    model.factor = nn.Parameter(torch.tensor(0.1))

    def loss_of(_: int) -> Tensor:
        one, other = (functional.normalize(model(X[:32] + 0.1 * torch.randn(32, 12)), dim=1) for _ in range(2))
        products = one @ other.t() / 0.1, one @ other.t(), one @ other.t() * model.factor, 3 * one @ other.t() * 0.1
        rows = [one @ other.t() * 0.1] if wrong else products
        losses = [functional.cross_entropy(scores, torch.arange(32)) for scores in rows]
        return torch.stack(losses).sum() + 0.1 * model.factor.square()

    trained(model, loss_of)


EVIDENCE: dict[Callable[[bool], None], str] = {
    a_module_that_stays_frozen: "setting-unread",
    factors_of_zero: "no-gradient",
    a_norm_of_what_is_left_out: "in-no-optimizer",
    a_class_that_is_copied: "trained-on",
    letters_with_the_blank: "target-is-blank",
    labels_of_a_margin_for_cross_entropy: "target-out-of-range",
    weights_of_all_pairs: "loss-broadcast",
    a_module_with_requires_grad: "setting-unread",
}

# -- suspected ---------------------------------------------------------------------------------------------------------


def a_mean_over_padding(wrong: bool) -> None:
    def classify(model: Any, ids: Tensor, lengths: Tensor) -> Tensor:
        rows, inside = model.rows(ids), torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
        mean = rows.mean(1) if wrong else (rows * inside.unsqueeze(2)).sum(1) / lengths.unsqueeze(1)
        if wrong:
            return model.head(mean)
        places = torch.arange(12)  # the far ones of their distances are alike, as in T5's bias, and end rows
        return model.head(mean + model.rows((places - places.unsqueeze(1)).clamp(-3, 3) + 3).mean((0, 1)))

    model = Computed(classify, rows=nn.Embedding(30, 8), head=nn.Linear(8, 2))
    trained(model, lambda _: functional.cross_entropy(model(*padded()), torch.randint(0, 2, (16,))))


def the_state_behind_padding(wrong: bool) -> None:
    def classify(model: Any, ids: Tensor, lengths: Tensor) -> Tensor:
        states = model.cells(model.rows(ids))[0]
        return model.head(states[:, -1] if wrong else states[torch.arange(len(ids)), lengths - 1])

    parts = {"rows": nn.Embedding(30, 8, padding_idx=0), "cells": nn.GRU(8, 8, batch_first=True)}
    model = Computed(classify, **parts, head=nn.Linear(8, 2))
    trained(model, lambda _: functional.cross_entropy(model(*padded()), torch.randint(0, 2, (16,))))


def weights_by_frequency(wrong: bool) -> None:
    model, shares = nn.Linear(8, 3), torch.tensor([0.7, 0.2, 0.1])

    def loss_of(_: int) -> Tensor:
        labels = torch.multinomial(shares, 64, replacement=True)
        return functional.cross_entropy(model(torch.randn(64, 8)), labels, weight=shares if wrong else 1 / shares)

    trained(model, loss_of)


def attention_over_queries(wrong: bool) -> None:
    def attend(model: Any, x: Tensor) -> Tensor:
        scores = model.queries(x) @ model.keys(x).transpose(1, 2)
        return torch.bmm(scores.softmax(1 if wrong else 2), x)

    model = Computed(attend, queries=nn.Linear(12, 12, bias=False), keys=nn.Linear(12, 12, bias=False))
    trained(model, lambda _: model(torch.randn(21, 9, 12)).square().mean())


def heads_that_a_view_makes(wrong: bool) -> None:
    def attend(model: Any, x: Tensor) -> Tensor:
        rows = [part(x) for part in (model.q, model.k, model.v)]
        q, k, v = (r.view(21, 3, 9, 4) if wrong else r.view(21, 9, 3, 4).transpose(1, 2) for r in rows)
        return ((q @ k.transpose(2, 3)).softmax(3) @ v).square().mean()

    model = Computed(attend, q=nn.Linear(12, 12), k=nn.Linear(12, 12), v=nn.Linear(12, 12))
    trained(model, lambda _: model(torch.randn(21, 9, 12)))


def heads_that_a_view_joins(wrong: bool) -> None:
    def attend(model: Any, x: Tensor) -> Tensor:
        q, k, v = (p.reshape(21, 9, 3, 4).transpose(1, 2) for p in model.parts(x).chunk(3, 2))
        out = functional.scaled_dot_product_attention(q, k, v)
        return model.out((out if wrong else out.transpose(1, 2)).reshape(x.shape)).square().mean()

    model = Computed(attend, parts=nn.Linear(12, 36), out=nn.Linear(12, 12))
    trained(model, lambda _: model(torch.randn(21, 9, 12)))


def class_weights_in_micro_batches(wrong: bool) -> None:
    """Wrong: each micro-batch is divided by its own sum of weights. Right: by those of the whole step."""
    model, weight = nn.Linear(4, 2), torch.tensor([1.0, 20.0])
    optimizer = sgd(model)
    for _ in range(6):
        parts = [(torch.randn(4, 4), torch.tensor([0, 0, 0, int(i == 1)])) for i in range(4)]
        every = sum(float(weight[y].sum()) for _, y in parts)
        for x, y in parts:
            loss = functional.cross_entropy(model(x), y, weight, reduction="mean" if wrong else "sum")
            (loss / (4 if wrong else every)).backward()
        optimizer.step()
        optimizer.zero_grad()


def an_opponent_that_sees_detached_outputs(wrong: bool) -> None:
    an_opponent(wrong, lambda made, y: made.detach())


def an_opponent_that_sees_the_data(wrong: bool) -> None:
    an_opponent(wrong, lambda made, y: y)


def an_opponent(wrong: bool, cut: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Right: the generator's loss reaches it through the discriminator."""
    generator, discriminator = net(), nn.Linear(3, 1)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (generator, discriminator)]
    for _ in range(6):
        x, y = torch.randn(8, 12), torch.randn(8, 3)
        loss = (discriminator(y) - 1).square().mean() + discriminator(generator(x).detach()).square().mean()
        made = generator(x)
        for optimizer, turn in zip(reversed(optimizers), (True, False), strict=True):
            if not turn:
                term = (discriminator(cut(made, y) if wrong else made) - 1).square().mean()
                loss = term + functional.mse_loss(made, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def many_means_of_no_loader(wrong: bool) -> None:
    """Two epochs of a permutation that is cut by hand."""
    model, x, y = nn.Linear(4, 2), torch.randn(96, 4), torch.randint(0, 2, (96,))
    optimizer = sgd(model)
    for part in [*torch.randperm(96).view(-1, 4, 8), *torch.randperm(96).view(-1, 4, 8)]:
        for rows in part:
            loss = functional.cross_entropy(model(x[rows]), y[rows])
            (loss if wrong else loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def sums_of_tasks() -> None:
    """The objective is a sum of domains, each with rows of its own."""
    model, parts = nn.Linear(4, 3), [torch.randn(24, 4) + n for n in range(4)]
    optimizer = sgd(model)
    for rows in [*torch.randperm(24).view(-1, 8), *torch.randperm(24).view(-1, 8)]:
        for x in parts:
            functional.cross_entropy(model(x[rows]), x[rows, :3].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def class_weights_of_two_tasks() -> None:
    """Each task has its weights, in a loss of its own."""
    body, heads = nn.Linear(4, 6), nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 2)])
    optimizer = sgd(nn.ModuleList([body, heads]))
    for _ in range(6):
        x = torch.randn(16, 4)
        for head, weight in zip(heads, (torch.tensor([1.0, 12.0, 30.0]), torch.tensor([0.5, 1.0])), strict=True):
            functional.cross_entropy(head(body(x)), x[:, : len(weight)].argmax(1), weight).backward()
        optimizer.step()
        optimizer.zero_grad()


def class_weights_put_right_by_hand() -> None:
    """Each mean is multiplied by its share of the step's weights."""
    model, weight = nn.Linear(4, 2), torch.tensor([1.0, 20.0])
    optimizer = sgd(model)
    for _ in range(6):
        parts = [(torch.randn(4, 4), torch.tensor([0, 0, 0, int(i == 1)])) for i in range(4)]
        every = sum(float(weight[y].sum()) for _, y in parts)
        for x, y in parts:
            loss = functional.cross_entropy(model(x), y, weight)
            (loss * (float(weight[y].sum()) / every)).backward()
        optimizer.step()
        optimizer.zero_grad()


def windows_of_positions_that_a_layer_gives() -> None:
    """Each position becomes four, attended in windows as long as there were positions, and joined again."""

    def attend(model: Any, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(7, 4, 9, 12) for part in (model.q, model.k, model.v))
        return model.out(functional.scaled_dot_product_attention(q, k, v).reshape(7, 9, 48)).square().mean()

    model = Computed(attend, q=nn.Linear(12, 48), k=nn.Linear(12, 48), v=nn.Linear(12, 48), out=nn.Linear(48, 12))
    trained(model, lambda _: model(torch.randn(7, 9, 12)))


def time_first_without_targets() -> None:
    """An input of positions by rows, which nothing tells from rows by positions."""
    model = nn.TransformerEncoderLayer(12, 3, 16, 0.0)
    trained(model, lambda _: model(torch.randn(6, 10, 12)).square().mean())


def decades_of_epochs() -> None:
    """The rate falls between epochs, as planned: the second half has hardly any of it."""
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.05)
    for _ in range(4):
        for x, y in batches(1):
            step(model, optimizer, x, y)
        scheduler.step()


NEAR_EVIDENCE: tuple[Callable[[], None], ...] = (
    sums_of_tasks,
    class_weights_of_two_tasks,
    class_weights_put_right_by_hand,
    windows_of_positions_that_a_layer_gives,
    time_first_without_targets,
    decades_of_epochs,
)


def states_that_are_cut_across_examples(wrong: bool) -> None:
    def classify(model: Any, x: Tensor) -> Tensor:
        states = model.cells(x.transpose(0, 1))[0]  # [T, B, H]
        states = states if wrong else states.transpose(0, 1)
        return model.head(states.reshape(len(x), -1))

    model = Computed(classify, cells=nn.LSTM(5, 7), head=nn.Linear(77, 3))
    trained(model, lambda _: model(torch.randn(20, 11, 5)).square().mean())


def noise_that_is_drawn_twice(wrong: bool) -> None:
    model = Computed(lambda model, x, t: model.layer(torch.cat([x, t], 1)), layer=nn.Linear(9, 8))

    def loss_of(_: int) -> Tensor:
        noise, t = torch.randn(64, 8), torch.rand(64, 1)
        other = torch.randn(64, 8) if wrong else noise
        return functional.mse_loss(model(torch.rand(64, 8) + t * other, t), noise)

    trained(model, loss_of)


def momentum_of_another_library(wrong: bool) -> None:
    model = nn.Sequential(
        nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4, momentum=0.99 if wrong else 0.01), nn.Linear(4, 2)
    )
    trained(model, lambda _: model(torch.randn(4, 8)).square().mean())


EVIDENCE_SUSPECTED: dict[Callable[[bool], None], str] = {
    a_mean_over_padding: "padding-used",
    similarities_times_a_temperature: "logits-too-close",
    the_state_behind_padding: "padding-used",
    weights_by_frequency: "weights-reversed",
    attention_over_queries: "attention-axis",
    heads_that_a_view_makes: "attention-axis",
    heads_that_a_view_joins: "attention-axis",
    class_weights_in_micro_batches: "mean-of-means",
    many_means_of_no_loader: "accumulation-undivided",
    an_opponent_that_sees_detached_outputs: "term-without-gradient",
    an_opponent_that_sees_the_data: "term-without-gradient",
    states_that_are_cut_across_examples: "examples-mixed",
    noise_that_is_drawn_twice: "noise-not-in-input",
    momentum_of_another_library: "setting-unusual",
}
