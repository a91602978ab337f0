"""Small trainings for `--check`: bugs, each with a similar correct program, and correct programs of unusual styles that
a recomputation could disturb.

In: torch. Out: functions, by the code of the expected finding.
"""

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

X = torch.randn(24, 6, 8, generator=torch.Generator().manual_seed(7))
Y = X.sum((1, 2)).gt(0).long()
WORDS = torch.randint(2, 30, (24, 9), generator=torch.Generator().manual_seed(8))
LENGTHS = torch.tensor([9, 4, 6, 3, 8, 5] * 4)
PADDED = WORDS.masked_fill(torch.arange(9) >= LENGTHS[:, None], 0)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def batches(*data: Tensor, size: int = 6) -> Iterator[tuple[Tensor, ...]]:
    for at in range(0, len(data[0]), size):
        yield tuple(each[at : at + size] for each in data)


def train(model: nn.Module, x: Tensor = X, y: Tensor = Y) -> None:
    optimizer = sgd(model)
    for a, b in batches(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(a), b).backward()
        optimizer.step()


# -- pairs -----------------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Adds a position embedding; wrong: of the row's place in the batch."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.places, self.head = wrong, nn.Embedding(24, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.size(0)))[:, None] if self.wrong else self.places(torch.arange(x.size(1)))
        return self.head((x + places).mean(1))  # type: ignore[no-any-return]


def positions_of_rows(wrong: bool) -> None:
    train(Positions(wrong))


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=batch_first)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))  # type: ignore[no-any-return]


def attention_over_rows(wrong: bool) -> None:
    train(Attention(batch_first=not wrong))


class Normalized(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.body, self.head, self.dim = nn.Linear(8, 8), nn.Linear(8, 2), dim

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.normalize(self.body(x.mean(1)), dim=self.dim))  # type: ignore[no-any-return]


def normalized_over_rows(wrong: bool) -> None:
    train(Normalized(0 if wrong else 1))


class Reader(nn.Module):
    """Classifies texts by the mean of their word embeddings. Wrong: padding is included in the mean."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.words, self.head = wrong, nn.Embedding(30, 8), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids > 0).float()[..., None]
        words = self.words(ids)
        return self.head(words.mean(1) if self.wrong else (words * mask).sum(1) / mask.sum(1))  # type: ignore[no-any-return]


def padding_that_is_read(wrong: bool) -> None:
    train(Reader(wrong), PADDED)


def padding_that_is_learned(wrong: bool) -> None:
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30))
    optimizer = sgd(model)
    for (ids,) in batches(PADDED):
        labels = ids if wrong else ids.masked_fill(ids == 0, -100)
        optimizer.zero_grad()
        functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


def accumulated(wrong: bool) -> None:
    model = nn.Linear(8, 2)
    optimizer = sgd(model)
    for i, (a, b) in enumerate(batches(X.mean(1), Y, size=3)):
        (functional.cross_entropy(model(a), b) / (1 if wrong else 2)).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


def divided_twice(wrong: bool) -> None:
    model = nn.Linear(8, 2)
    optimizer = sgd(model)
    for i, (a, b) in enumerate(batches(X.mean(1), Y, size=3)):
        (functional.cross_entropy(model(a), b) / 2 / (2 if wrong else 1)).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


def means_of_unequal_parts(wrong: bool) -> None:
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30))
    optimizer = sgd(model)
    for ids, lengths in batches(PADDED, LENGTHS, size=6):
        for half in (slice(0, 1), slice(1, 6)):
            labels = ids[half].masked_fill(ids[half] == 0, -100)
            loss = functional.cross_entropy(model(ids[half]).flatten(0, 1), labels.flatten(), reduction="mean")
            share = 0.5 if wrong else float(lengths[half].sum() / lengths.sum())
            (loss * share).backward()
        optimizer.step()
        optimizer.zero_grad()


def scaled_by_hand(wrong: bool) -> None:
    """Wrong: the script multiplies gradients by three. Control: it multiplies the loss by three."""
    model = nn.Linear(8, 2)
    optimizer = sgd(model)
    for a, b in batches(X.mean(1), Y):
        optimizer.zero_grad()
        (functional.cross_entropy(model(a), b) * (1 if wrong else 3)).backward()
        if wrong:
            for p in model.parameters():
                p.grad *= 3
        optimizer.step()


def left_by_another_loss(wrong: bool) -> None:
    """Wrong: a generator's backward leaves gradients in the critic."""
    critic, generator = nn.Linear(8, 1), nn.Linear(4, 8)
    ours, theirs = sgd(critic), sgd(generator)
    for (a,) in batches(X.mean(1)):
        noise = torch.randn(6, 4)
        theirs.zero_grad()
        if wrong:
            for p in critic.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad * 0.5
        functional.softplus(-critic(generator(noise))).mean().backward()
        theirs.step()
        if not wrong:
            ours.zero_grad()
        loss = functional.softplus(-critic(a)).mean() + functional.softplus(critic(generator(noise).detach())).mean()
        loss.backward()
        ours.step()


def half_precision_weights(wrong: bool) -> None:
    model = nn.Linear(8, 2).to(torch.bfloat16 if wrong else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for a, b in batches(X.mean(1), Y):
        optimizer.zero_grad()
        functional.cross_entropy(model(a.to(model.weight.dtype)), b).backward()
        optimizer.step()


def overwritten_in_the_step(wrong: bool) -> None:
    model = nn.Linear(8, 2)
    optimizer = sgd(model)
    if wrong:
        optimizer.register_step_post_hook(lambda *_: model.weight.data.mul_(0.9))
    for a, b in batches(X.mean(1), Y):
        optimizer.zero_grad()
        functional.cross_entropy(model(a), b).backward()
        optimizer.step()


class Impure(nn.Module):
    """Wrong: reads a counter outside of itself; right: a buffer."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.body = wrong, nn.Linear(8, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.wrong:
            COUNTED.append(1)
        return self.body(x) * (1 + (len(COUNTED) if self.wrong else float(self.count)))  # type: ignore[no-any-return]


COUNTED: list[int] = []


def state_outside_of_the_model(wrong: bool) -> None:
    train(Impure(wrong), X.mean(1))


class WithLoss(nn.Module):
    """Returns its own loss: the mean over targets that are not ignored or, if pooled, over examples."""

    def __init__(self, pooled: bool = False) -> None:
        super().__init__()
        self.pooled, self.body, self.drop, self.head = pooled, nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.drop(self.body(x).tanh())
        h = h - h.mean(0, keepdim=True) if self.pooled else h
        return functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


LABELS = torch.randint(0, 3, (24, 6), generator=torch.Generator().manual_seed(9))


def parts_as_one_batch(wrong: bool) -> None:
    """Wrong: the model mixes examples of a batch. Control: it does not, and all parts have equally many targets."""
    model = WithLoss(wrong)
    optimizer = sgd(model)
    for i, (x, labels) in enumerate(batches(X, LABELS, size=4)):
        (model(x, labels) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


class Seeding(nn.Module):
    """Wrong: seeds its dropout in each forward. Control: draws masks from a separate generator."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.head = wrong, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.mean(1)
        if self.wrong:
            torch.manual_seed(5)
            return self.head(functional.dropout(h, 0.3, self.training))  # type: ignore[no-any-return]
        mask = torch.rand(h.shape, generator=torch.Generator().manual_seed(5)).gt(0.3) if self.training else 1
        return self.head(functional.dropout(h * mask, 0.1, self.training))  # type: ignore[no-any-return]


def masks_that_are_seeded(wrong: bool) -> None:
    train(Seeding(wrong))


class Dropping(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.head = wrong, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        training = True if self.wrong else self.training
        return self.head(functional.dropout(x.mean(1), 0.3, training=training))  # type: ignore[no-any-return]


def dropout_that_stays_on(wrong: bool) -> None:
    train(Dropping(wrong))


class Sampling(nn.Module):
    """Adds noise to its code, in evaluation as well: right, as in a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.head = nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        code = self.code(x.mean(1))
        return self.head(code + torch.randn_like(code))  # type: ignore[no-any-return]


def in_two_micro_batches(model: nn.Module) -> None:
    optimizer = sgd(model)
    for i, (x, y) in enumerate(batches(X, Y, size=4)):
        (functional.cross_entropy(model(x), y) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


class Recurrent(nn.Module):
    """Characters, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(9, 8), nn.GRU(8, 8), nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(ids))[0])


def streams_time_first() -> None:
    model = Recurrent()
    optimizer = sgd(model)
    for ids in torch.randint(0, 9, (40, 4)).split(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten()).backward()
        optimizer.step()


def codes_that_are_sampled() -> None:
    in_two_micro_batches(Sampling())


def statistics_of_micro_batches() -> None:
    """Batch norm under accumulation: right, and not to be compared."""
    in_two_micro_batches(nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))


PAIRS: dict[Callable[[bool], None], str] = {
    positions_of_rows: "check-rows",
    attention_over_rows: "check-rows",
    normalized_over_rows: "check-rows",
    padding_that_is_read: "check-padding",
    padding_that_is_learned: "check-padding",
    accumulated: "check-accumulation",
    divided_twice: "divided-twice",
    means_of_unequal_parts: "check-tokens",
    scaled_by_hand: "check-gradient",
    left_by_another_loss: "check-gradient",
    half_precision_weights: "check-lost-update",
    overwritten_in_the_step: "check-update",
    state_outside_of_the_model: "check-twice",
    parts_as_one_batch: "check-one-batch",
    masks_that_are_seeded: "check-seed",
    dropout_that_stays_on: "check-seed",
}


# -- programs whose bits a recomputation could change ------------------------------------------------------------------

NOISE = torch.Generator()
BANK = torch.zeros(8, 8)


class Stateful(nn.Module):
    """Holds state that a second forward would change: counters, lists, an auxiliary loss, statistics, a bank,
    generators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.drop, self.calls, self.seen = nn.Dropout(0.2), 0, [0.0]
        self.average = torch.zeros(8)
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.drop(functional.relu(self.body(self.norm(x))))
        h = h + torch.randn(h.shape, generator=NOISE) * 0.1 + random.random() * 0.1
        self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        BANK[self.calls % 8] = h.detach()[0]
        self.seen.append(float(h.detach().sum()))
        self.auxiliary = h.square().mean() * (1 + 0.1 * self.calls) + self.seen[-2] * 1e-3 * h.mean()
        return self.head(h + self.average + BANK.mean(0))  # type: ignore[no-any-return]


def stateful() -> nn.Module:
    NOISE.manual_seed(5)
    BANK.zero_()
    model = Stateful()
    scale: list[float] = []
    model.head.register_forward_hook(lambda m, args, output: scale.append(float(output.detach().mean())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(4):
        for x, y in batches(X.mean(1), Y, size=12):
            loss = (
                functional.cross_entropy(model(x), y)
                + model.auxiliary * 0.1
                + (scale[-2] if len(scale) > 1 else 0) * (model.head.weight.sum() * 1e-3)
            )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=i % 2 == 0)
    return model


def plain_stateful() -> nn.Module:
    """`stateful` without the script's hook, so that the step is recomputed."""
    NOISE.manual_seed(5)
    BANK.zero_()
    model = Stateful()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        for x, y in batches(X.mean(1), Y, size=12):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            assert model.auxiliary is not None
            (loss + model.auxiliary * 0.1).backward()
            optimizer.step()
    return model


def under_autocast() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in batches(X.mean(1), Y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def with_a_closure() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for x, y in batches(X.mean(1), Y):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


def in_backward() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    for p in model.parameters():
        own = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda p, own=own: (own.step(), own.zero_grad())[0])
    for x, y in batches(X.mean(1), Y):
        functional.cross_entropy(model(x), y).backward()
    return model


KEEP_BITS: tuple[Callable[[], nn.Module], ...] = (stateful, plain_stateful, under_autocast, with_a_closure, in_backward)
