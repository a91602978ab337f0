"""Small trainings whose losses get logits across axes, answers, or one embedding twice, or are divided twice; each with
a similar correct program, and correct programs that come close.

In: torch. Out: functions, by the code of the expected finding.
"""

import io
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from support.traced_cases import X, Y, batches, net, sgd, step

TOKENS = torch.randint(2, 20, (24, 9), generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, loss_of: Callable[[int], Tensor], count: int = 4) -> None:
    optimizer = sgd(model, 0.01)
    for i in range(count):
        optimizer.zero_grad()
        loss_of(i).backward()
        optimizer.step()


# -- logits ------------------------------------------------------------------------------------------------------------


def a_map_of_classes(wrong: bool) -> None:
    model = nn.Conv2d(1, 3, 3, padding=1)

    def loss_of(_: int) -> Tensor:
        logits, y = model(torch.randn(2, 1, 6, 6)), torch.randint(0, 3, (72,))
        return functional.cross_entropy(logits.view(-1, 3) if wrong else logits.permute(0, 2, 3, 1).reshape(-1, 3), y)

    trained(model, loss_of)


def classes_of_positions(wrong: bool) -> None:
    model = nn.Linear(4, 5)

    def loss_of(_: int) -> Tensor:
        logits, y = model(torch.randn(2, 10, 4)), torch.randint(0, 5, (2, 10))
        return functional.cross_entropy(logits.view(2, 5, 10) if wrong else logits.transpose(1, 2), y)

    trained(model, loss_of)


def two_views_with_themselves(wrong: bool) -> None:
    model = nn.Linear(12, 6)

    def loss_of(_: int) -> Tensor:
        views = functional.normalize(model(torch.cat([X[:8], X[:8] + 0.1 * torch.randn(8, 12)])))
        scores = views @ views.T / 0.5
        scores = scores if wrong else scores.masked_fill(torch.eye(16).bool(), -1e9)
        return functional.cross_entropy(scores, torch.arange(16).roll(8))

    trained(model, loss_of)


def a_queue_of_keys(wrong: bool) -> None:
    model, queue = nn.Linear(12, 6), functional.normalize(torch.randn(64, 6))

    def loss_of(i: int) -> Tensor:
        nonlocal queue
        query = functional.normalize(model(X[:12]))
        with torch.no_grad():
            keys = functional.normalize(model(X[:12] + 0.1 * torch.randn(12, 12)))
        after = torch.cat([keys, queue])[:64]
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ (after if wrong else queue).T], 1)
        queue = after
        return functional.cross_entropy(logits / 0.2, torch.zeros(12, dtype=torch.long))

    trained(model, loss_of)


# -- answers -----------------------------------------------------------------------------------------------------------


def a_label_among_the_features(wrong: bool) -> None:
    model = nn.Linear(12, 3)

    def loss_of(i: int) -> Tensor:
        rows = torch.randperm(96)[:12]
        x = torch.cat([X[rows, 1:], Y[rows if wrong else rows.roll(1), None].float()], 1)
        return functional.cross_entropy(model(x), Y[rows])

    trained(model, loss_of)


class Decoder(nn.Module):
    """Reads tokens with a causal mask. `memory`: a summary of all tokens is added. `shifts`: embeddings are moved.
    `noise` is added to embeddings. `narrow`: each token goes through two numbers."""

    def __init__(self, memory: bool = False, shifts: bool = False, noise: float = 0, narrow: bool = False) -> None:
        super().__init__()
        self.embedding, self.other = nn.Embedding(20, 8), nn.Embedding(20, 8)
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, 20)
        self.memory, self.shifts, self.noise = memory, shifts, noise
        if narrow:
            self.head = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 20))  # type: ignore[assignment]

    def forward(self, ids: Tensor, whole: Tensor) -> Tensor:
        rows = self.embedding(ids)
        if self.noise:
            rows = rows + self.noise * torch.randn_like(rows)
        if self.shifts:
            rows = torch.cat([torch.zeros_like(rows[:, :1]), rows[:, :-1]], 1)
        if self.memory:
            rows = rows + self.other(whole).mean(1, keepdim=True)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layer(rows, src_mask=mask, is_causal=True)).flatten(0, 1)


def a_decoder_of_its_targets(wrong: bool) -> None:
    model = Decoder()

    def loss_of(i: int) -> Tensor:
        ids = TOKENS[torch.randperm(24)[:8]]
        return functional.cross_entropy(model(ids[:, 1:] if wrong else ids[:, :-1], ids), ids[:, 1:].flatten())

    trained(model, loss_of)


# -- steps -------------------------------------------------------------------------------------------------------------


def divided_twice(wrong: bool) -> None:
    """Control: the mean of three losses, over three batches."""
    model = net()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(batches(3)):
        loss = functional.cross_entropy(model(x), y)
        if not wrong:
            loss = loss + functional.cross_entropy(model(-x), y) + functional.cross_entropy(model(x * 2), y)
        (loss / 3 / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def a_generator_with_its_discriminator(wrong: bool) -> None:
    """Control: the generator alone."""
    adversaries(wrong, ascends=False)


def adversaries(holds: bool, ascends: bool) -> None:
    """Two adversaries. `ascends`: another loss also trains the discriminator on purpose, to be deceived."""
    maker, judge = nn.Linear(4, 12), nn.Linear(12, 1)
    nn.init.constant_(maker.bias, 2.0)
    own = sgd(nn.ModuleList([maker, judge]) if holds else maker, 0.01)
    other = sgd(judge, 0.01)
    for x, _ in batches(2):
        other.zero_grad()
        real, made = judge(x - 1), judge(maker(torch.randn(12, 4)).detach())
        (functional.softplus(-real).mean() + functional.softplus(made).mean()).backward()
        other.step()
        own.zero_grad()
        made = judge(maker(torch.randn(12, 4)))
        (functional.softplus(made) if ascends else functional.softplus(-made)).mean().backward()
        own.step()


def a_schedule_that_is_not_loaded(wrong: bool) -> None:
    go_on_from_a_file("nothing" if wrong else "state")


def factor(i: int) -> float:
    return min((i + 1) / 10, 1) * (1 - i / 60)


def go_on_from_a_file(by: str, steps: int = 12) -> None:
    """Resume with optimizer and schedule. `by`: what is restored of the schedule."""
    shift, file = [0], io.BytesIO()

    def begun(rate: float = 0.1) -> tuple[Any, Any, Any]:
        model = nn.Linear(12, 3)
        optimizer = sgd(model, rate)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: factor(i + shift[0]))

    def go(model: nn.Module, optimizer: Any, schedule: Any) -> None:
        for x, y in [*batches(2)][:steps]:
            step(model, optimizer, x, y)
            schedule.step()

    parts = begun()
    go(*parts)
    torch.save({i: part.state_dict() for i, part in enumerate(parts)}, file)
    file.seek(0)
    states = torch.load(file, weights_only=False)
    model, optimizer, schedule = begun(0.02 if by == "lower" else 0.1)  # a phase whose first step has the old rate
    model.load_state_dict(states[0])
    if by == "last_epoch":
        schedule.last_epoch = steps
    if by == "state":
        schedule.load_state_dict(states[2])
    optimizer.load_state_dict(states[1])
    if by == "shift":
        shift[0] = steps
    if by == "rate":
        optimizer.param_groups[0]["lr"] = 0.01
    if by == "phase":
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    go(model, optimizer, schedule)


ANSWERS: dict[Callable[[bool], None], str] = {
    a_map_of_classes: "classes-across-axes",
    classes_of_positions: "classes-across-axes",
    two_views_with_themselves: "itself-among-candidates",
    a_queue_of_keys: "positive-among-negatives",
    divided_twice: "divided-twice",
    a_schedule_that_is_not_loaded: "schedule-anew",
    a_generator_with_its_discriminator: "in-two-optimizers",
}


# -- reported under --verbose ------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A layer with low-rank matrices named as in peft."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.lora_A, self.head = nn.ModuleDict({"default": nn.Linear(12, 4, bias=False)}), nn.Linear(4, 3)
        self.lora_A.requires_grad_(trains)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lora_A["default"](x))


def an_adapter_that_was_loaded_for_inference(wrong: bool) -> None:
    model = nn.Sequential(Adapted(not wrong))
    optimizer = sgd(model)
    for x, y in batches(1):
        step(model, optimizer, x, y)


ANSWERS_SUSPECTED: dict[Callable[[bool], None], str] = {
    an_adapter_that_was_loaded_for_inference: "adapter-frozen",
    a_label_among_the_features: "answer-in-input",
}

# -- correct programs that come close ----------------------------------------------------------------------------------


def classes_that_are_split_off_or_places() -> None:
    """Correct: several outputs of one layer; rows as classes; as many positions (of a heat map or a row) as
    channels."""
    many, choice, places = nn.Linear(12, 15), nn.Linear(12, 1), nn.Conv2d(1, 16, 3, padding=1)
    points = nn.Linear(12, 7)

    def loss_of(_: int) -> Tensor:
        y = torch.randint(0, 5, (8, 3))
        first = functional.cross_entropy(many(X[:8]).view(8, 3, 5).transpose(1, 2), y)
        second = functional.cross_entropy(choice(X[:40].view(8, 5, 12).flatten(0, 1)).view(8, 5), y[:, 0])
        heat = places(torch.randn(2, 1, 4, 4)).flatten(2)
        first = first + functional.cross_entropy(heat.reshape(-1, 16), torch.randint(0, 16, (32,)))
        pointed = points(torch.randn(8, 7, 12)).permute(0, 2, 1).reshape(-1, 7)
        return first + second + functional.cross_entropy(pointed, torch.randint(0, 7, (56,)))

    trained(nn.ModuleList([many, choice, places, points]), loss_of)


def pairs_of_embeddings() -> None:
    """Correct losses over pairs: an example as its own candidate; a lowered diagonal; repeated captions; a logit for
    "no match"; a state that may follow itself; repeated rows, self-pairs excluded."""
    model = nn.Linear(12, 6)

    def loss_of(i: int) -> Tensor:
        rows = functional.normalize(model(X[:16]))
        own = functional.cross_entropy(rows @ rows.T / 0.1, torch.arange(16))
        lowered = functional.cross_entropy(rows @ rows.T / 0.1 - 1e4 * torch.eye(16), torch.arange(16).roll(1))
        twice = functional.normalize(model(X[16:24])).repeat(2, 1)
        captions = functional.cross_entropy(rows @ twice.T / 0.1, torch.arange(16))
        none = torch.cat([rows[:, :1] * 0, rows @ X[:16, :6].T], 1)
        first = torch.zeros(16, dtype=torch.long)
        states = model(X[:16])
        following = functional.cross_entropy(states @ states.T, torch.arange(16).roll(1))
        again = model(X[:8].repeat(2, 1)) @ model(X[:8].repeat(2, 1)).T
        others = again[~torch.eye(16).bool()].view(16, 15)
        repeated = functional.cross_entropy(torch.cat([again.diag()[:, None], others], 1), first)
        return own + lowered + captions + functional.cross_entropy(none, first) + following + repeated

    trained(model, loss_of)


def decoders_that_move_or_sum_up_their_targets() -> None:
    """Correct: embeddings are shifted; an autoencoder summarizes the text that its decoder repeats."""
    shifting, summing = Decoder(shifts=True), Decoder(memory=True)

    def loss_of(i: int) -> Tensor:
        ids = TOKENS[torch.randperm(24)[:8]]
        begun = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
        first = functional.cross_entropy(shifting(ids, ids), ids.flatten())
        if i % 2:
            return first
        return functional.cross_entropy(summing(begun, ids), ids.flatten())

    trained(nn.ModuleList([shifting, summing]), loss_of, 8)


def decoders_of_tokens_that_are_given() -> None:
    """Correct: a streaming codec, a denoiser, and a tagger that changes few tokens, all causal."""
    for model, changes in ((Decoder(narrow=True), 9), (Decoder(noise=2.0), 9), (Decoder(), 3)):

        def loss_of(i: int, model: nn.Module = model, changes: int = changes) -> Tensor:
            ids = TOKENS[torch.randperm(24)[:8]]
            y = ids.clone()
            y[0, 0] += i == changes
            return functional.cross_entropy(model(ids, ids), y.flatten() % 20)

        trained(model, loss_of)


def features_like_the_target() -> None:
    """Correct: a noisy vote for the class; a class-conditional generator; columns to be reconstructed."""
    model, made = nn.Linear(13, 3), nn.Linear(15, 12)

    def loss_of(i: int) -> Tensor:
        rows = torch.randperm(96)[:24]
        vote = torch.where(torch.rand(24) < 0.2, 0, Y[rows])
        classes = functional.cross_entropy(model(torch.cat([X[rows], vote[:, None].float()], 1)), Y[rows])
        drawn = made(torch.cat([torch.randn(24, 12), functional.one_hot(Y[rows], 3).float()], 1))
        table = torch.randint(0, 3, (24, 13))
        restored = model(table.float())
        classes = (
            classes + functional.cross_entropy(restored, table[:, 0]) + functional.cross_entropy(restored, table[:, 1])
        )
        return classes + functional.mse_loss(drawn, X[rows]) + functional.mse_loss(made(drawn.new_ones(24, 15)), drawn)

    trained(nn.ModuleList([model, made]), loss_of)


def schedules_that_go_on_by_hand() -> None:
    for by in ("last_epoch", "shift", "rate", "phase", "lower"):
        go_on_from_a_file(by)
    go_on_from_a_file("shift", 4)  # within the warm-up


def a_schedule_that_restarts_in_each_cycle() -> None:
    """Correct: the optimizer keeps its momentum from cycle to cycle, while the schedule restarts."""
    model, state = net(), None
    for _ in range(3):
        optimizer = sgd(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 * (1 + math.cos(math.pi * i / 8)))
        if state is not None:
            optimizer.load_state_dict(state)
        for x, y in batches(1):
            step(model, optimizer, x, y)
            schedule.step()
        state = optimizer.state_dict()


def two_losses_that_share_a_judge() -> None:
    """Correct: both optimizers train the judge, with gradients that agree."""
    adversaries(True, ascends=True)


def a_part_that_is_unlearned_by_an_optimizer_of_its_own() -> None:
    """Correct: one optimizer unlearns rows, another trains on the remaining rows; both hold all weights."""
    model = net()
    keeps, forgets = sgd(model, 0.01), sgd(model, 0.001)
    for x, y in batches(2):
        step(model, keeps, x, y)
        forgets.zero_grad()
        (-functional.cross_entropy(model(x), y)).backward()
        forgets.step()


def losses_with_weights_of_their_own() -> None:
    """Correct: a loss weight of 1/4, for one or several losses, with four batches in a step."""
    model = net()
    optimizer = sgd(model)
    for i, (x, y) in enumerate([*batches(3), *batches(3)]):
        weight = (0.25, 0.5, 1.0, 0.25)[i % 4] if i < 24 else 0.25
        (functional.cross_entropy(model(x), y) * weight / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def gradients_of_functions_and_sparse_inputs() -> None:
    """Correct: gradients of functions and sparse inputs, which the tracer cannot read and skips."""
    model, other = nn.Linear(12, 3), nn.Linear(96, 3)

    def loss_of(_: int) -> Tensor:
        weights = dict(model.named_parameters())
        taken = torch.func.grad(lambda w: torch.func.functional_call(model, w, (X,)).square().mean())(weights)
        moved = {name: weights[name] - 0.1 * taken[name] for name in weights}
        graph = functional.cross_entropy(other(torch.eye(96).to_sparse()), Y)
        return graph + functional.cross_entropy(torch.func.functional_call(model, moved, (X,)), Y)

    trained(nn.ModuleList([model, other]), loss_of)


NEAR_ANSWERS: tuple[Callable[[], None], ...] = (
    classes_that_are_split_off_or_places,
    pairs_of_embeddings,
    decoders_that_move_or_sum_up_their_targets,
    decoders_of_tokens_that_are_given,
    features_like_the_target,
    schedules_that_go_on_by_hand,
    a_schedule_that_restarts_in_each_cycle,
    two_losses_that_share_a_judge,
    a_part_that_is_unlearned_by_an_optimizer_of_its_own,
    losses_with_weights_of_their_own,
    gradients_of_functions_and_sparse_inputs,
)
