"""Small trainings whose noise, averages, ratios or inputs contradict themselves, each with a similar correct program;
and correct programs that are close.

In: torch. Out: functions, by the code of the expected finding.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from support.proved_cases import PADDED
from support.traced_cases import DATA, X, Y, batches, net, sgd, step


class Dropping(nn.Module):
    """Functional dropout. `way`: how it gets the mode."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.one, self.other, self.way = nn.Linear(12, 16), nn.Linear(16, 3), way

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).relu()
        if self.way == "attention":
            p = 0.5 if self.training else 0.0
            x = x + functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=p)[0]
        if self.way == "attention always":
            x = x + functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0]
        if self.way == "not given":
            x = functional.dropout(x, 0.5)
        if self.way == "given":
            x = functional.dropout(x, 0.5, self.training)
        if self.way == "always":  # as in a prenet
            x = functional.dropout(x, 0.5, training=True)
        return self.other(x)


def _evaluated(model: nn.Module, x: Sequence[Tensor] = (X[:6] + 9, X[6:12] + 9)) -> None:
    model.eval()
    with torch.no_grad():
        for each in x:
            model(each)
    model.train()


def dropout_in_evaluation(wrong: bool, ways: tuple[str, str] = ("not given", "given")) -> None:
    model = Dropping(ways[0] if wrong else ways[1])
    optimizer = sgd(model)
    for _ in range(2):
        for x, y in batches(1):
            step(model, optimizer, x, y)
        _evaluated(model)


def attention_that_drops_in_evaluation(wrong: bool) -> None:
    dropout_in_evaluation(wrong, ("attention always", "attention"))


def seeded_in_each_step(wrong: bool) -> None:
    model = net(0.5)
    optimizer = sgd(model)
    for x, y in [*batches()]:
        if wrong:
            torch.manual_seed(1)
        step(model, optimizer, x, y)


def an_average_with_swapped_factors(wrong: bool) -> None:
    model = nn.Sequential(net(), nn.Identity())
    model.target = copy.deepcopy(model[0]).requires_grad_(False)
    model.forward = lambda x: model[0](x) + 0 * model.target(x)  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    decay = 0.01 if wrong else 0.99
    for x, y in batches():
        step(model, optimizer, x, y)
        for old, new in zip(model.target.parameters(), model[0].parameters(), strict=True):
            old.data.lerp_(new.data, 1 - decay)


def old_probabilities_of_new_weights(wrong: bool, epochs: int = 2) -> None:
    model = net()
    optimizer = sgd(model)
    with torch.no_grad():
        kept = model(X).log_softmax(1).gather(1, Y[:, None])
    for _ in range(epochs):
        for rows in torch.randperm(96).split(24):
            new = model(X[rows]).log_softmax(1).gather(1, Y[rows, None])
            old = new.detach() if wrong else kept[rows]
            ratio = (new - old).exp()
            gain = torch.randn(len(rows), 1)
            optimizer.zero_grad()
            (-torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()).backward()
            optimizer.step()


def a_function_of_all_pairs(wrong: bool, weights: Tensor | None = None) -> None:
    """A hand-written Huber-like loss of all pairs, with targets from a loader."""
    model = nn.Linear(12, 1)
    optimizer = sgd(model, 1e-3)
    for x, y in DataLoader(TensorDataset(X, X[:, 0] + X[:, 1]), 12):
        optimizer.zero_grad()
        out = model(x) if wrong else model(x).squeeze(1)
        apart = (1 + (out - y) ** 2).sqrt() - 1
        (apart if weights is None else apart * weights).mean().backward()
        optimizer.step()


def padding_that_is_learned(wrong: bool) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ids in PADDED.split(6):
        mask = (ids != 0).long()
        labels = ids.clone() if wrong else ids.masked_fill(mask == 0, -100)
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()


def two_optimizers_of_one_network(wrong: bool) -> None:
    """Control: each network has its own optimizer."""
    one, other = nn.Linear(12, 4), nn.Linear(4, 3)
    optimizers = [sgd(one), sgd(one if wrong else other)]
    for x, y in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        functional.cross_entropy(other(one(x)), y).backward()
        for optimizer in optimizers:
            optimizer.step()


PIXELS = torch.rand(48, 6, 8, generator=torch.Generator().manual_seed(3)) * 0.6


def inputs_on_another_scale(wrong: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    optimizer = sgd(model)
    train = TensorDataset((PIXELS[:36] - 0.3) / 0.173, Y[:36])
    held = PIXELS[36:] if wrong else (PIXELS[36:] - 0.3) / 0.173
    for _ in range(2):
        for x, y in DataLoader(train, 9, shuffle=True):
            step(model, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            for x, _ in DataLoader(TensorDataset(held, Y[36:48]), 6):
                model(x)
        model.train()


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(4, 8, batch_first=batch_first), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.view(-1, 3, 4))[0][:, -1])


def examples_as_time(wrong: bool) -> None:
    model = Recurrent(not wrong)
    optimizer = sgd(model)
    for x, y in batches(1):
        step(model, optimizer, x, y)


def an_evaluation_that_seeds(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    for i in range(16):
        rows = torch.randint(0, 48, (12,))
        step(model, optimizer, X[rows], Y[rows])
        if i % 4 == 3:
            with torch.random.fork_rng(enabled=not wrong), torch.no_grad():
                torch.manual_seed(0)
                model(X + torch.randn_like(X))


NOISE: dict[Callable[[bool], None], str] = {
    an_evaluation_that_seeds: "seeded-again",
    dropout_in_evaluation: "dropout-in-evaluation",
    attention_that_drops_in_evaluation: "dropout-in-evaluation",
    seeded_in_each_step: "seeded-again",
    a_function_of_all_pairs: "loss-broadcast",
    padding_that_is_learned: "padding-learned",
    two_optimizers_of_one_network: "in-no-optimizer",
    inputs_on_another_scale: "inputs-on-another-scale",
    examples_as_time: "examples-as-time",
}

NOISE_SUSPECTED: dict[Callable[[bool], None], str] = {
    an_average_with_swapped_factors: "average-follows",
    old_probabilities_of_new_weights: "ratio-of-one",
}


# -- correct programs --------------------------------------------------------------------------------------------------


def samples_of_predictions() -> None:
    """Monte Carlo dropout by a function: each example is predicted four times. A prenet that always drops says so."""
    for way, times in (("not given", 4), ("always", 1)):
        model = Dropping(way)
        optimizer = sgd(model)
        for _ in range(2):
            for x, y in batches(1):
                step(model, optimizer, x, y)
            _evaluated(model, [X[:6] + 9] * times)


def pairs_that_are_weighted() -> None:
    a_function_of_all_pairs(True, torch.eye(12))


def ratios_of_one_epoch() -> None:
    """Correct: on-policy training uses each example once, so its ratio is 1."""
    old_probabilities_of_new_weights(True, 1)


def averages_that_are_right() -> None:
    """Correct: an average whose decay begins small, an exact copy, and a copy updated every fourth step."""
    for kind in ("warm", "copy", "seldom"):
        model, average = net(), net().requires_grad_(False)
        optimizer = sgd(model)
        for i, (x, y) in enumerate(batches()):
            with torch.no_grad():
                average(x)
            step(model, optimizer, x, y)
            decay = {"warm": (1 + i) / (10 + i), "copy": 0.0, "seldom": 0.0 if i % 4 == 0 else 1.0}[kind]
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.data.copy_(decay * old.data + (1 - decay) * new.data)


def rows_that_are_frames() -> None:
    """Correct: ordered rows, over which a layer runs on purpose."""
    model = Recurrent(False)
    optimizer = sgd(model)
    for x, y in DataLoader(DATA, 12):
        step(model, optimizer, x, y)


def draws_that_are_repeated() -> None:
    """Control: each step draws new numbers, twice, without changing the generator's state elsewhere."""
    model = net(0.5)
    optimizer = sgd(model)
    for i, (x, y) in enumerate([*batches()]):
        with torch.random.fork_rng():
            torch.manual_seed(i)
            step(model, optimizer, x, y)


SIMILAR = (
    samples_of_predictions,
    pairs_that_are_weighted,
    ratios_of_one_epoch,
    averages_that_are_right,
    rows_that_are_frames,
    draws_that_are_repeated,
)
