"""Small trainings whose fault is reported under --verbose, each with a similar correct program.

In: torch. Out: functions, by the code of the expected finding.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset
from transformers import get_linear_schedule_with_warmup

from support.traced_cases import DATA, X, Y, batches, net, sgd, step


def rows_sorted_by_class(wrong: bool) -> None:
    """Control: shuffled rows."""
    order = Y.sort().indices if wrong else torch.randperm(len(Y))
    model = net()
    optimizer = sgd(model)
    for x, y in DataLoader(TensorDataset(X[order], Y[order]), batch_size=8):
        step(model, optimizer, x, y)


def swapped_groups(wrong: bool) -> None:
    model = net()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    decay, none = (vectors, matrices) if wrong else (matrices, vectors)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": none, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for x, y in batches():
        step(model, optimizer, x, y)


def an_absolute_difference(wrong: bool) -> None:
    """Control: differences of all pairs of outputs, as in a ranking loss."""
    model = nn.Linear(12, 1)
    optimizer = sgd(model, 1e-3)
    for x in X.split(16):
        optimizer.zero_grad()
        out, target = model(x), x[:, 0]
        pairs = out - out.squeeze(1)
        ((out - target).abs() if wrong else (pairs - 1).pow(2)).mean().backward()
        optimizer.step()


def a_divergence_of_probabilities(wrong: bool) -> None:
    """A KL divergence written by hand, equal to torch's."""
    model = net()
    optimizer = sgd(model, 1e-3)
    for x, y in batches():
        optimizer.zero_grad()
        out = model(x).softmax(-1) if wrong else model(x).log_softmax(-1)
        target = functional.one_hot(y, 3) * 0.7 + 0.1
        (torch.xlogy(target, target) - target * out).sum().backward()
        optimizer.step()


def a_plateau(wrong: bool) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max" if wrong else "min", patience=1)
    for _ in range(8):
        losses = []
        for x, y in batches(1):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step(sum(losses) / len(losses))


def folds_of_one_model(wrong: bool) -> None:
    model = net()
    for fold in range(3):
        model = model if wrong else net()
        optimizer = sgd(model)
        for x, y in batches(1, Subset(DATA, [i for i in range(96) if i % 3 != fold])):
            step(model, optimizer, x, y)
        with torch.no_grad():
            model.eval()(X[fold::3])
        model.train()


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids))[0])


TEXT = torch.randint(0, 11, (64, 9), generator=torch.Generator().manual_seed(3))


def tokens_that_are_copied(wrong: bool) -> None:
    model = Language()
    optimizer = sgd(model)
    for ids in TEXT.split(8):
        optimizer.zero_grad()
        tokens, target = (ids, ids) if wrong else (ids[:, :-1], ids[:, 1:])
        functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten()).backward()
        optimizer.step()


class Padded(Language):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (super().forward(input_ids) * attention_mask[..., None]).sum(1)


def a_mask_of_another_number(wrong: bool) -> None:
    """Rows of unequal lengths, padded with 10; 0 is a token."""
    model = Padded()
    optimizer = sgd(model)
    length = torch.arange(64) % 6 + 2
    ids = torch.where(torch.arange(9) < length[:, None], TEXT % 10, 10)
    for rows in ids.split(8):
        optimizer.zero_grad()
        out = model(input_ids=rows, attention_mask=(rows != (0 if wrong else 10)).long())
        functional.cross_entropy(out, rows[:, 0]).backward()
        optimizer.step()


def an_optimizer_in_each_epoch(wrong: bool) -> None:
    """Control: each new optimizer loads the state of the one before."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        state = optimizer.state_dict()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01 / (1 + epoch))
        if not wrong:
            optimizer.load_state_dict(state)
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + epoch)
        for x, y in batches(1):
            step(model, optimizer, x, y)


class Listed(nn.Module):
    """Layers in a Python list, or in an `nn.ModuleList`, which registers them."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(12, 12) for _ in range(2)]
        self.layers = layers if plain else nn.ModuleList(layers)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def layers_in_a_list(wrong: bool) -> None:
    model = Listed(wrong)
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)


def a_decay_in_each_step(wrong: bool) -> None:
    """A decay factor meant for epochs, applied in each step."""
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.3)
    for _ in range(4):
        for x, y in batches(1):
            step(model, optimizer, x, y)
            if wrong:
                scheduler.step()
        if not wrong:
            scheduler.step()


def labels_of_another_pass(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)
    rows = DataLoader(TensorDataset(X + 1, Y), batch_size=12, shuffle=wrong)
    with torch.no_grad():
        _ = [model(x) for x, _ in rows], [y for _, y in rows]


def an_evaluation_in_each_epoch(wrong: bool) -> None:
    """Control: training mode again after it."""
    model = net(0.1)
    optimizer = sgd(model)
    for _ in range(3):
        model.train()
        for i, (x, y) in enumerate(batches(1)):
            step(model, optimizer, x, y)
            if i == 1:
                model.eval()
                with torch.no_grad():
                    model(X[:5] + 1)
                model.train(not wrong)


def a_warm_up_and_a_length_exchanged(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    rows = [*batches(6)]
    schedule = get_linear_schedule_with_warmup(optimizer, *((len(rows), 3) if wrong else (3, len(rows))))
    for x, y in rows:
        step(model, optimizer, x, y)
        schedule.step()


SUSPECTED: dict[Callable[[bool], None], str] = {
    labels_of_another_pass: "orders-differ",
    rows_sorted_by_class: "one-class-batches",
    swapped_groups: "decay-of-vectors",
    an_absolute_difference: "loss-broadcast",
    a_divergence_of_probabilities: "loss-of-probabilities",
    a_plateau: "scheduler-direction",
    folds_of_one_model: "trained-on",
    tokens_that_are_copied: "labels-not-shifted",
    a_mask_of_another_number: "padding-seen",
    an_optimizer_in_each_epoch: "optimizer-made-anew",
    layers_in_a_list: "unregistered",
    a_decay_in_each_step: "rate-vanishes",
    an_evaluation_in_each_epoch: "trained-in-evaluation-mode",
    a_warm_up_and_a_length_exchanged: "scheduler-unit",
}
