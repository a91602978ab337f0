"""Correct programs that look like faults: averages with a ramp, noise in training, priors and targets in a list, random
layers, heads of one task.

In: torch. Out: functions; none of them may be accused.
"""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from support.noise_cases import PIXELS, Dropping
from support.traced_cases import X, Y, batches, net, sgd, step


def averages_with_a_ramp() -> None:
    """Averages as in object detectors, whose decay starts near 0."""
    for decay in (lambda i: 0.9999 * (1 - math.exp(-i / 2000)), lambda i: min(0.01, (1 + i) / (10 + i))):
        model = net()
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = sgd(model)
        for i, (x, y) in enumerate(batches()):
            with torch.no_grad():
                average(x)
            step(model, optimizer, x, y)
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.data.lerp_(new.data, 1 - decay(i + 1))


def noise_on_dark_pixels() -> None:
    """Randomized smoothing: trained with noise, evaluated without."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    optimizer = sgd(model)
    dark = PIXELS * 0.4
    for x, y in DataLoader(TensorDataset(dark[:36], Y[:36]), 4, shuffle=True):
        step(model, optimizer, x + torch.randn_like(x), y)
    model.eval()
    with torch.no_grad():
        for x, _ in DataLoader(TensorDataset(dark[36:], Y[36:48]), 6):
            model(x)


def a_head_that_begins_at_zero_under_signs() -> None:
    """Rows whose gradients have equal signs stay equal for some steps of an optimizer that uses only signs."""
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.zeros_(model[2].weight)  # type: ignore[arg-type]
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-3)
    for _ in range(8):
        optimizer.zero_grad()
        functional.mse_loss(model(X), torch.tensor([1.0, 2.0, 3.0]).expand(96, 3)).backward()
        optimizer.step()


def a_layer_that_is_perturbed() -> None:
    """A second optimizer perturbs the weights of the first layer adversarially."""
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    up, down = sgd(model[0], 0.01), sgd(model, 0.05)
    for x, y in batches(2):
        up.zero_grad()
        (-functional.cross_entropy(model(x), y)).backward()
        up.step()
        step(model, down, x, y)


class Averaged(nn.Module):
    """A model that averages several random draws in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(12, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.layer(x))
        return torch.stack([self.head(functional.dropout(hidden, 0.3)) for _ in range(1 if self.training else 8)]).mean(
            0
        )


def a_regression_that_averages_draws() -> None:
    model = Averaged()
    optimizer = sgd(model, 0.01)
    for x, _ in batches(2):
        optimizer.zero_grad()
        functional.mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for x, _ in batches(1):
            model(x)


class Views(nn.Module):
    """Two views of each example, with as many positions as there are examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(1, 8), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([x, x + 0.1]).unsqueeze(-1).transpose(0, 1)  # [12 positions, 24 rows, 1]
        return self.head(self.layer(rows)[0][-1].view(len(x), 16))


def two_views_of_each_example() -> None:
    model = Views()
    optimizer = sgd(model)
    for x, y in batches(1):
        step(model, optimizer, x, y)


def a_bandit_of_contexts() -> None:
    """Each context gets a new action, and is used once with each action."""
    model = net()
    optimizer = sgd(model, 0.01)
    for _ in range(2):
        for rows in torch.arange(96).split(24):
            chosen = model(X[rows]).log_softmax(1)
            new = chosen.gather(1, torch.multinomial(chosen.detach().exp(), 1))
            ratio, gain = (new - new.detach()).exp(), torch.randn(len(rows), 1)
            optimizer.zero_grad()
            (-torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()).backward()
            optimizer.step()


class Forked(nn.Module):
    """A layer that draws under `fork_rng`, like layers that are split over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.count = net(0.5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        with torch.random.fork_rng():
            torch.manual_seed(self.count)
            return self.body(x)


def dropout_of_its_own_generator() -> None:
    model = Forked()
    optimizer = sgd(model)
    for x, y in [*batches()]:
        step(model, optimizer, x, y)


def noise_of_a_generator_of_images() -> None:
    """Image translation whose noise is dropout, in evaluation as well."""
    model = Dropping("not given")
    optimizer = sgd(model)
    for x, _ in batches(1):
        optimizer.zero_grad()
        functional.l1_loss(model(x), x[:, :3]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for rows in (X[:6], X[6:12]):
            model(rows + 9)


def a_search_for_a_rate() -> None:
    """A range test sets one rate, which grows, for all groups."""
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[3].parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for i, (x, y) in enumerate(batches()):
        for group in optimizer.param_groups:
            group["lr"] = 1e-5 * 1.5**i
        step(model, optimizer, x, y)


class Priors(nn.Module):
    """An ensemble with fixed random prior networks, which a list hides from the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([nn.Linear(12, 3) for _ in range(2)])
        self.priors = [nn.Linear(12, 3) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([a(x) + b(x) for a, b in zip(self.nets, self.priors, strict=True)]).mean(0)


def random_priors() -> None:
    model = Priors()
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)


class RandomLayers(nn.Module):
    """A random layer that distorts the input, or a new head for each task that learns in the forward."""

    def __init__(self, of_task: bool) -> None:
        super().__init__()
        self.body, self.of_task = nn.Linear(12, 12), of_task
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if not self.of_task:
            return self.head(torch.relu(self.body(nn.Linear(12, 12)(x))))
        features, head = torch.relu(self.body(x)), nn.Linear(12, 3)
        loss = functional.cross_entropy(head(features.detach()), y)
        rows = torch.autograd.grad(loss, [*head.parameters()])
        weight, bias = (p - 0.1 * g for p, g in zip(head.parameters(), rows, strict=True))
        return functional.linear(features, weight, bias)


def layers_that_are_random_on_purpose() -> None:
    for of_task in (False, True):
        model = RandomLayers(of_task)
        optimizer = sgd(model)
        for x, y in batches(1):
            optimizer.zero_grad()
            functional.cross_entropy(model(x, y) if of_task else model(x), y).backward()
            optimizer.step()


def tokens_that_are_hidden_at_random() -> None:
    """Past tokens are hidden from attention, and all are predicted."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        ids = torch.randint(0, 20, (6, 12))
        mask = (torch.rand(6, 12) > 0.4).long()
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        optimizer.step()


def a_long_schedule_of_a_short_run() -> None:
    """A schedule over a round number of epochs that happens to equal the trial's number of steps."""
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for _ in range(4):
        for x, y in DataLoader(TensorDataset(X[:60], Y[:60]), 12, shuffle=True):
            step(model, optimizer, x, y)
        scheduler.step()


def a_distance_of_distributions() -> None:
    """A generator trained by a distance of distributions: no output belongs to an example."""
    model = nn.Linear(12, 1)
    optimizer = sgd(model, 1e-3)
    for _, y in DataLoader(TensorDataset(X, X[:, 0]), 12):
        optimizer.zero_grad()
        out = model(torch.randn(12, 12))
        (2 * (out - y).abs().mean() - (out - out.T).abs().mean()).backward()
        optimizer.step()


def networks_that_are_frozen_in_turn() -> None:
    """Freeze the network that does not step, as in a GAN, and unfreeze it before its own step."""
    one, other = nn.Linear(12, 12), nn.Linear(12, 3)
    optimizers = [torch.optim.Adam(m.parameters(), weight_decay=0.1) for m in (one, other)]
    for i, (x, y) in enumerate(batches()):
        for model, on in ((one, i % 2 == 0), (other, i % 2 == 1)):
            model.requires_grad_(on)
        optimizers[i % 2].zero_grad(set_to_none=False)
        functional.cross_entropy(other(one(x)), y).backward()
        optimizers[i % 2].step()


def a_layer_that_leaves_the_optimizer() -> None:
    """Freeze the first layer by the optimizer's groups, and update another by hand once it was replaced."""
    first, head = nn.Linear(12, 12), nn.ModuleDict({"of": nn.Linear(12, 3)})
    model = nn.ModuleDict({"first": first, "head": head})
    optimizer = torch.optim.SGD([{"params": m.parameters()} for m in (first, head, net())], lr=0.01)
    for i, (x, y) in enumerate(batches()):
        if i == 3:
            del optimizer.param_groups[0]
            head["of"] = nn.Linear(12, 3)
        model.zero_grad()
        functional.cross_entropy(head["of"](first(x)), y).backward()
        optimizer.step()
        with torch.no_grad():
            for p in head["of"].parameters() if i >= 3 else ():
                p -= 0.01 * p.grad


class Followed(nn.Module):
    """An encoder, and one with batch norm that follows it (MoCo): its weights need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8))
        self.key, self.head = copy.deepcopy(self.query).requires_grad_(False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for followed, following in zip(self.query.parameters(), self.key.parameters(), strict=True):
            following.data = 0.9 * following.data + 0.1 * followed.data
        query = self.query(x)
        return self.head(query), functional.mse_loss(query, self.key(x))


def a_momentum_encoder_with_batch_norm() -> None:
    model = Followed()
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        logits, distance = model(x)
        (functional.cross_entropy(logits, y) + distance).backward()
        optimizer.step()


class OfRows(nn.Module):
    """A layer for nested rows of any length, whose mean is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack([self.layer(row).mean(0) for row in rows.unbind()])


def nested_rows() -> None:
    model = OfRows()
    optimizer = sgd(model)
    for layout in (torch.strided, torch.jagged):
        for i in range(4):
            rows = torch.nested.nested_tensor([X[i : i + 2], X[i : i + 3]], layout=layout)
            step(model, optimizer, rows, Y[i : i + 2])


RIGHT_ON_PURPOSE: tuple[Callable[[], None], ...] = (
    a_layer_that_is_perturbed,
    a_regression_that_averages_draws,
    averages_with_a_ramp,
    noise_on_dark_pixels,
    a_head_that_begins_at_zero_under_signs,
    two_views_of_each_example,
    a_bandit_of_contexts,
    dropout_of_its_own_generator,
    noise_of_a_generator_of_images,
    a_search_for_a_rate,
    random_priors,
    layers_that_are_random_on_purpose,
    tokens_that_are_hidden_at_random,
    a_long_schedule_of_a_short_run,
    a_distance_of_distributions,
    networks_that_are_frozen_in_turn,
    nested_rows,
)
