"""Small trainings with gradients, weights, schedules or attention that go unused: each with a similar correct program,
and correct programs that come close.

In: torch. Out: functions, by the code of the expected finding.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from support.traced_cases import DATA, X, Y, batches, net, sgd, step

TOKENS = torch.randint(2, 20, (24, 9), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.randint(4, 9, (24,), generator=torch.Generator().manual_seed(2))
PADDED = torch.where(torch.arange(9) < LENGTHS[:, None], TOKENS, 0)


class LanguageModel(nn.Module):
    def __init__(self, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.causal = nn.Embedding(20, 8), causal
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor, hidden: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.causal else None
        return self.head(self.layer(self.embedding(ids), src_mask=mask, src_key_padding_mask=hidden))


def texts(passes: int = 1, data: Tensor = TOKENS) -> Iterator[Tensor]:
    for _ in range(passes):
        yield from data[torch.randperm(len(data))].split(6)


# -- a fault, and a similar correct program ----------------------------------------------------------------------------


def a_micro_batch_alone(wrong: bool, to_none: bool = True) -> None:
    model = net()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(batches()):
        if wrong or i % 2 == 0:
            optimizer.zero_grad(set_to_none=to_none)
        (functional.cross_entropy(model(x), y) / 2).backward()
        if i % 2:
            optimizer.step()


def a_micro_batch_alone_in_place(wrong: bool) -> None:
    a_micro_batch_alone(wrong, to_none=False)


def a_step_made_twice(wrong: bool) -> None:
    """Control: other gradients, set by hand, in the second step."""
    model = net()
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)
        if not wrong:
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def clipped_after_the_step(wrong: bool) -> None:
    """Control: the norm alone, for a log."""
    model = net()
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1 if wrong else torch.inf)


def clipped_before_backward(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        loss.backward()
        if not wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def keys_with_a_prefix(wrong: bool) -> None:
    """Control: a second load, without the prefix."""
    model, state = net(), net().state_dict()
    model.load_state_dict({f"_orig_mod.{name}": value for name, value in state.items()}, strict=False)
    if not wrong:
        model.load_state_dict(state)
    optimizer = sgd(model)
    for x, y in batches(1):
        step(model, optimizer, x, y)


def normalized_over_examples(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    for x, y in batches(1):
        optimizer.zero_grad()
        functional.nll_loss(functional.log_softmax(model(x), 0 if wrong else 1), y).backward()
        optimizer.step()


def shuffled_apart(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    for _ in range(2):
        rows = torch.randperm(96)
        classes = torch.randperm(96) if wrong else rows
        for a, b in zip(rows.split(12), classes.split(12), strict=True):
            step(model, optimizer, X[a], Y[b])


def a_schedule_of_steps(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=24)
    for _ in range(3):
        for x, y in batches(1):
            step(model, optimizer, x, y)
            if not wrong:
                scheduler.step()
        if wrong:
            scheduler.step()


def a_cosine_of_epochs(wrong: bool, length: int = 4) -> None:
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
    for _ in range(4):
        for x, y in batches(1):
            step(model, optimizer, x, y)
            if wrong:
                scheduler.step()
        if not wrong:
            scheduler.step()


def answers_in_the_input(wrong: bool, dropout: float = 0.0) -> None:
    model = LanguageModel(not wrong, dropout)
    optimizer = sgd(model)
    for ids in texts():
        optimizer.zero_grad()
        functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()


def answers_in_the_input_with_dropout(wrong: bool) -> None:
    answers_in_the_input(wrong, 0.1)


def an_inverted_mask(wrong: bool) -> None:
    model = LanguageModel(False)
    optimizer = sgd(model)
    for ids in texts(1, PADDED):
        optimizer.zero_grad()
        outputs = model(ids, (ids == 0) != wrong).mean(1)
        functional.cross_entropy(outputs, ids[:, 0]).backward()
        optimizer.step()


PROVED: dict[Callable[[bool], None], str] = {
    a_micro_batch_alone: "gradients-cleared",
    a_micro_batch_alone_in_place: "gradients-cleared",
    a_step_made_twice: "step-repeated",
    clipped_after_the_step: "clip-unused",
    clipped_before_backward: "clip-unused",
    keys_with_a_prefix: "loaded-nothing",
    normalized_over_examples: "softmax-dimension",
    answers_in_the_input: "future-seen",
    answers_in_the_input_with_dropout: "future-seen",
    an_inverted_mask: "mask-inverted",
    a_schedule_of_steps: "scheduler-unit",
}


# -- reported under --verbose ------------------------------------------------------------------------------------------


def a_sum_of_means(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(batches()):
        loss = functional.cross_entropy(model(x), y)
        (loss if wrong else loss / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


LIKELY: dict[Callable[[bool], None], str] = {
    a_cosine_of_epochs: "scheduler-unit",
    a_sum_of_means: "accumulation-undivided",
    shuffled_apart: "pairs-change",
}


# -- correct programs that come close ----------------------------------------------------------------------------------


def cosines_that_go_up_and_down() -> None:
    """Correct: cosine periods of one epoch and of three steps, while the run has 4 epochs."""
    for length in (8, 3):
        a_cosine_of_epochs(True, length)


def surgery_on_gradients() -> None:
    """Correct: the gradients of two tasks are read, cleared and combined."""
    model = net()
    optimizer = sgd(model)
    for x, y in batches():
        parts = []
        for half in (slice(0, 6), slice(6, 12)):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[half]), y[half]).backward()
            parts.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
        for parameter, one, other in zip(model.parameters(), *parts, strict=True):
            parameter.grad = one + other
        optimizer.step()


def a_look_at_other_examples() -> None:
    """Correct: the loss is weighted by the norm of a gradient over held-out examples, which is then cleared."""
    model = net()
    optimizer = sgd(model)
    for (x, y), (u, v) in zip(batches(), batches(), strict=True):
        optimizer.zero_grad()
        functional.cross_entropy(model(u), v).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).sum()  # type: ignore[union-attr]
        optimizer.zero_grad()
        (functional.cross_entropy(model(x), y) / (1 + norm)).backward()
        optimizer.step()


def ascents_and_descents() -> None:
    """Correct: sharpness-aware minimization; the first gradient perturbs the weights and is cleared."""
    model = net()
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad for p in model.parameters()]  # type: ignore[operator]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter += move
        step_of_moved(model, optimizer, moves, x, y)


def step_of_moved(model: nn.Module, optimizer: torch.optim.SGD, moves: list[Tensor], x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter -= move
    optimizer.step()


def two_optimizers_after_one_backward() -> None:
    """Correct: the second optimizer's gradients are clipped after the first one's step."""
    body, head = nn.Linear(12, 8), nn.Linear(8, 3)
    first, second = sgd(body), sgd(head)
    for x, y in batches():
        functional.cross_entropy(head(body(x)), y).backward()
        nn.utils.clip_grad_norm_(body.parameters(), 0.1)
        first.step()
        nn.utils.clip_grad_norm_(head.parameters(), 0.1)
        second.step()
        first.zero_grad()
        second.zero_grad()


def matched_in_the_batch() -> None:
    """Correct: classes are positions in the batch, so an example has another class on each visit."""
    model = nn.Linear(12, 12)
    optimizer = sgd(model)
    for x, _ in batches():
        order = torch.randperm(12)
        optimizer.zero_grad()
        functional.cross_entropy(model(x) @ x[order].T, order.argsort()).backward()
        optimizer.step()


def similarities_both_ways() -> None:
    model = nn.Linear(12, 12)
    optimizer = sgd(model)
    for x, _ in batches():
        likeness, places = model(x) @ x.T, torch.arange(12)
        optimizer.zero_grad()
        sum(functional.nll_loss(likeness.log_softmax(dim), places) for dim in (0, 1)).backward()  # type: ignore[union-attr]
        optimizer.step()


def a_prefix_that_sees_itself() -> None:
    """Correct: all positions attend to the prefix, which has no targets."""
    layer, embedding, head = nn.Linear(8, 24), nn.Embedding(20, 8), nn.Linear(8, 20)
    model = nn.ModuleDict({"layer": layer, "embedding": embedding, "head": head})
    seen = torch.ones(8, 8).tril().bool()
    seen[:, :4] = True

    def forward(ids: Tensor) -> Tensor:
        hidden = embedding(ids)
        query, key, value = layer(hidden).chunk(3, -1)
        weights = (query @ key.transpose(1, 2)).masked_fill(~seen, -1e9).softmax(-1)
        return head(hidden + weights @ value)

    model.forward = forward  # type: ignore[method-assign]
    optimizer = sgd(model)
    for ids in texts(2):
        targets = ids[:, 1:].masked_fill(torch.arange(8) < 4, -100)
        optimizer.zero_grad()
        functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()


def a_mask_by_small_numbers() -> None:
    """Correct: a causal mask that lowers the scores of later tokens by only 40."""
    embedding, layer, head = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 20)
    model = nn.ModuleDict({"embedding": embedding, "layer": layer, "head": head})
    later = torch.ones(8, 8).triu(1) * -40.0

    def forward(ids: Tensor) -> Tensor:
        query, key, value = layer(embedding(ids)).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(*(t.unsqueeze(1) for t in (query, key, value)), attn_mask=later)
        return head(mixed.squeeze(1))

    model.forward = forward  # type: ignore[method-assign]
    optimizer = sgd(model)
    for ids in texts(2):
        optimizer.zero_grad()
        functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()


def a_checkpoint_that_may_not_fit() -> None:
    """Correct: the script inspects the missing keys after the load."""
    model = net()
    result = model.load_state_dict({"other": torch.zeros(3)}, strict=False)
    assert result.missing_keys
    optimizer = sgd(model)
    for x, y in DataLoader(DATA, batch_size=12):
        step(model, optimizer, x, y)


def one_checkpoint_for_two_parts() -> None:
    """Correct: two parts load their own keys of one checkpoint, which has no keys for one of them."""
    model, state = net(), {f"body.{name}": value for name, value in net().state_dict().items()}
    body, head = nn.Sequential(), nn.Linear(3, 3)
    body.add_module("body", model)
    for part in (body, head):
        part.load_state_dict(state, strict=False)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for x, y in DataLoader(DATA, batch_size=12):
        optimizer.zero_grad()
        functional.cross_entropy(head(body(x)), y).backward()
        optimizer.step()


CLOSE = (
    cosines_that_go_up_and_down,
    one_checkpoint_for_two_parts,
    surgery_on_gradients,
    a_look_at_other_examples,
    ascents_and_descents,
    two_optimizers_after_one_backward,
    matched_in_the_batch,
    similarities_both_ways,
    a_prefix_that_sees_itself,
    a_mask_by_small_numbers,
    a_checkpoint_that_may_not_fit,
)
