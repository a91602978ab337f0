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
    """A value loss that broadcasts, plus another term. Control: weighted pairs."""
    model = nn.Linear(12, 1)
    optimizer = sgd(model, 1e-3)
    for x in X.split(8):
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
    """Averaged weights replace the trained ones for evaluations. Control: a copy of the trained ones is restored."""
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
    """Control: the norms are frozen again after each `train()`."""
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


def a_state_that_is_not_loaded(wrong: bool) -> None:
    """A run that resumes from a checkpoint, with a schedule for the whole training."""
    states: dict[str, object] = {}
    for part in range(2):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
        if part:
            model.load_state_dict(states["model"])  # type: ignore[arg-type]
        if part and not wrong:
            optimizer.load_state_dict(states["optimizer"])  # type: ignore[arg-type]
            scheduler.load_state_dict(states["scheduler"])  # type: ignore[arg-type]
        for x, y in batches(1):
            step(model, optimizer, x, y)
            scheduler.step()
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        states = {name: copy.deepcopy(each.state_dict()) for name, each in parts.items()}


def a_schedule_of_micro_batches(wrong: bool) -> None:
    """The schedule's length counts optimizer steps."""
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    for i, (x, y) in enumerate(batches(3)):
        (functional.cross_entropy(model(x), y) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        if (wrong and i) or i % 2:
            scheduler.step()


def steps_in_hooks(wrong: bool) -> None:
    """Control: hooks that run after the gradient is accumulated."""
    model = net()

    def attach(parameter: nn.Parameter) -> None:
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def apply(_: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        if wrong:
            parameter.register_hook(apply)
        else:
            parameter.register_post_accumulate_grad_hook(apply)

    for parameter in model.parameters():
        attach(parameter)
    for x, y in batches():
        functional.cross_entropy(model(x), y).backward()


class Language(nn.Module):
    """A language model that takes a mask and labels, and shifts the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embedding(input_ids) * attention_mask.unsqueeze(-1))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def ends_that_also_pad(wrong: bool) -> None:
    """Control: labels are ignored where the mask is 0."""
    model = Language()
    optimizer = sgd(model)
    for ids in torch.randint(1, 9, (24, 7)).split(6):
        lengths = torch.tensor([[7], [6], [5], [5], [4], [3]])
        mask = (torch.arange(7) < lengths).long()
        ids = ids.masked_fill(torch.arange(7) >= lengths - 1, 0)
        optimizer.zero_grad()
        hidden = ids == 0 if wrong else mask == 0
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(hidden, -100)).backward()
        optimizer.step()


CONTRADICTIONS: dict[Callable[[bool], None], str] = {
    squares_of_all_pairs: "loss-broadcast",
    probabilities_in_kl_div: "loss-of-probabilities",
    an_average_instead_of_the_weights: "self-load",
    frozen_norms: "norm-not-frozen",
    norms_frozen_for_one_pass: "norm-not-frozen",
    numbers_in_a_list: "unregistered",
    a_state_that_is_not_loaded: "state-not-loaded",
    a_schedule_of_micro_batches: "scheduler",
    steps_in_hooks: "stale-gradient",
    ends_that_also_pad: "end-not-learned",
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
    """Correct: statistics adapt under frozen weights; a body is scored alone before training."""
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
    """Correct: numbers in a list, updated through `.data`, whose writes torch does not count."""
    model = Weighted(True)
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)
        for scale in model.scales:
            scale.data -= 0.1 * scale.grad
            scale.grad = None


def numbers_learned_later() -> None:
    """Correct: the optimizer of these numbers begins after a warm-up."""
    model = Weighted(True)
    optimizer, later = sgd(model), torch.optim.Adam(model.scales)
    for i, (x, y) in enumerate(batches(3)):
        step(model, optimizer, x, y)
        if i > 10:
            later.step()
            later.zero_grad()


def a_schedule_that_begins_later() -> None:
    """The schedule begins at `last_epoch`; the optimizer's state is loaded."""
    model = net()
    state = None
    for epoch in range(2):
        optimizer = torch.optim.AdamW([{"params": model.parameters(), "initial_lr": 0.02}], lr=0.02)
        if state is not None:
            optimizer.load_state_dict(state)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16, last_epoch=8 * epoch - 1)
        for x, y in batches(1):
            step(model, optimizer, x, y)
            scheduler.step()
        state = copy.deepcopy(optimizer.state_dict())


def a_second_phase() -> None:
    """Control: a second phase starts from the last weights with empty moments and a new schedule; the first phase was
    saved completely."""
    model = net()
    for _ in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        for x, y in batches(1):
            step(model, optimizer, x, y)
            scheduler.step()
        copy.deepcopy(optimizer.state_dict())


def a_schedule_of_epochs_and_steps() -> None:
    """Correct: a schedule that counts micro-batches and is stepped with each."""
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    for i, (x, y) in enumerate(batches(3)):
        (functional.cross_entropy(model(x), y) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        if i:
            scheduler.step()


def embeddings_with_sparse_gradients() -> None:
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        table(torch.randint(0, 20, (8, 3))).square().sum().backward()
        optimizer.step()


UNUSUAL = (
    embeddings_with_sparse_gradients,
    a_schedule_that_begins_later,
    a_second_phase,
    a_schedule_of_epochs_and_steps,
    distances_of_all_pairs,
    statistics_that_adapt,
    numbers_updated_by_hand,
    numbers_learned_later,
)
