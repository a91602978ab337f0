"""Small trainings of several kinds each: some have a fault, others are correct and come close to it.

In: torch. Out: functions of a kind; `COMPOSED`: the code of the expected finding, faulty kinds, correct kinds.
"""

import copy
import io
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from support.evidence_cases import Computed, padded
from support.traced_cases import X, Y, net, sgd, step


def learned(optimizer: torch.optim.Optimizer, losses: Iterator[Tensor]) -> None:
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def a_variational_loss(kind: str) -> None:
    encoder, decoder = nn.Linear(12, 8), nn.Linear(4, 12)

    def losses() -> Iterator[Tensor]:
        for i in torch.arange(96).split(12):
            mean, log = encoder(X[i]).chunk(2, 1)
            made = decoder(mean + torch.randn_like(mean) * (log / 2).exp())
            parts = 1 + log - mean**2 - log.exp()
            prior = -0.5 * (parts.sum(1).mean() if kind == "a mean of sums" else parts.sum())
            prior = {"divided": prior / 12, "a small weight": 1e-4 * prior}.get(kind, prior)
            if kind == "a counted divisor":
                prior = (parts.sum() * -0.5) / (X[i, 0] < 9).sum()
            if kind == "a product of examples":  # [12, 12], as many features as examples
                prior = (made.T @ made / 12).square().sum()
            if kind == "weights that add to 1":
                prior = (-0.5 * parts.sum(1) * X[i, 0].softmax(0)).sum()
            if kind == "a penalty":
                prior = sum(p.square().sum() for p in decoder.parameters()) + prior / 12
            yield functional.mse_loss(made, X[i], reduction="sum" if kind == "two sums" else "mean") + prior

    learned(torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-3), losses())


def a_divergence(kind: str) -> None:
    """KL divergence of a student: a sum over the batch, divided by the batch size."""
    model, teacher = net(), net().requires_grad_(False)

    def losses() -> Iterator[Tensor]:
        for i in torch.arange(96).split(12):
            soft, out = functional.softmax(teacher(X[i]), 1), model(X[i])
            yield functional.kl_div(out.log_softmax(1), soft, reduction=kind) * 16 + functional.cross_entropy(out, Y[i])

    learned(sgd(model, 0.01), losses())


def an_actor_and_a_critic(kind: str) -> None:
    body, actor, critic, gate = nn.Linear(12, 16), nn.Linear(16, 3), nn.Linear(16, 1), nn.Linear(12, 1)
    parameters = [p for m in (body, actor, critic, gate) for p in m.parameters()]

    def losses() -> Iterator[Tensor]:
        for i in torch.arange(96).split(12):
            hidden, returns = torch.tanh(body(X[i])), X[i].sum(1)
            choice, value = torch.distributions.Categorical(logits=actor(hidden)), critic(hidden).squeeze(-1)
            log, errors = choice.log_prob(choice.sample()), returns - value
            if kind == "a ratio":
                ratio = (log - log.detach() - 0.01).exp()
                yield -torch.min(ratio * errors, ratio.clamp(0.8, 1.2) * errors).mean() + errors.square().mean()
            elif kind == "normalized":
                advantage = (errors - errors.mean()) / (errors.std() + 1e-8)
                yield -(log * advantage).mean() + 0.5 * functional.mse_loss(value, returns)
            elif kind == "detached":
                yield -(log * errors.detach()).mean() + 0.5 * errors.square().mean()
            elif kind == "no error of its own":
                yield -(log * errors).mean()
            elif kind == "two errors":
                other = X[i, 0] - gate(X[i])[:, 0]
                yield errors.square().mean() + other.square().mean() + 0.5 * (errors * other).mean()
            elif kind == "a precision":
                yield (errors.square() * (-log).exp() + log).mean()
            else:  # a gate on the error of one head, and an error of another
                yield (errors * gate(X[i]).sigmoid()[:, 0]).abs().mean() + functional.mse_loss(
                    actor(hidden)[:, 0], returns
                )

    learned(torch.optim.Adam(parameters, 1e-3), losses())


def values_of_states(kind: str) -> None:
    model, other = (nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in range(2))

    def losses() -> Iterator[Tensor]:
        for i in torch.arange(96).split(12):
            reward, following, at = X[i].sum(1), X[i].roll(1, 0), Y[i].clamp(max=1).unsqueeze(1)
            value = model(X[i]).gather(1, at).squeeze(1)
            target = reward + 0.9 * (reward > 0).float() * model(following).max(1).values
            if kind == "both":
                value = reward + 0.1 * model(X[i]).mean(1)
                target = reward + 0.1 * model(following).mean(1)
            if kind == "another network":
                target = reward + 0.9 * other(X[i]).mean(1)
            if kind == "near inputs":
                target = model(X[i] + 0.01).gather(1, at).squeeze(1)
            if kind == "by hand":
                yield (value - target).square().mean()
            elif kind == "residual":
                yield functional.mse_loss(reward + 0.1 * value, reward * 2)
            else:
                yield functional.smooth_l1_loss(value, target.detach() if kind == "detached" else target)

    learned(torch.optim.Adam([*model.parameters(), *other.parameters()], 1e-3), losses())


def tokens(kind: str) -> None:
    index = 0 if "tags" in kind else None
    model = nn.Sequential(nn.Embedding(30, 16, padding_idx=index), nn.Linear(16, 30))

    def losses() -> Iterator[Tensor]:
        for _ in range(8):
            ids, lengths = padded()
            ids = ids.clamp(max=28)
            inside = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
            targets, ignored = functional.pad(ids[:, 1:], (0, 1)), -100
            chosen = torch.rand(ids.shape) < 0.15
            if kind in ("copies", "masked", "all copied"):
                targets = ids.clone() if kind == "copies" else ids.masked_fill(~chosen, -100)
                targets = ids.clone() if kind == "all copied" else targets
                ids = ids if kind == "all copied" else ids.masked_fill(chosen, 29)
                targets = targets.masked_fill(~inside, -100)
            elif kind == "a corrector":  # wrong symbols occur as right ones, too
                targets, ids = ids.masked_fill(~inside, -100), ids.masked_fill(chosen & inside, 5)
            elif kind in ("tags", "ignored tags"):
                targets, ignored = (ids % 3 + 1).masked_fill(~inside, 0), 0 if kind == "ignored tags" else -100
            elif kind == "ignored":
                targets = targets.masked_fill(~inside.roll(-1, 1), -100)
            logits = model(ids)
            if kind in ("mean of masked", "divided by the mask", "divided by its mean", "hazards"):
                inside = torch.randint(1, 12, (16, 1)) > torch.arange(12) if kind == "hazards" else inside
                each = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none") * inside
                divided = each.mean() / inside.float().mean() if "its" in kind else each.sum() / inside.sum()
                yield each.mean() if kind in ("mean of masked", "hazards") else divided
            else:
                yield functional.cross_entropy(logits.reshape(-1, 30), targets.reshape(-1), ignore_index=ignored)

    learned(torch.optim.Adam(model.parameters(), 1e-2), losses())


def items(kind: str) -> None:
    table = nn.Embedding(20, 8, padding_idx=None if kind == "no padding" else 0)
    model = Computed(lambda m, ids: m.head(m.table(ids)), table=table, head=nn.Linear(8, 3))

    def losses() -> Iterator[Tensor]:
        for i in torch.arange(96).split(12):
            ids = torch.arange(len(i)) % 19 + (0 if kind in ("from 0", "no padding") else 1)
            if kind == "missing":
                ids[torch.randperm(len(i))[:6]] = 0
            if kind == "rows":
                ids = ids.unsqueeze(1).repeat(1, 4)
                ids[:, 2:] = 0
            yield functional.cross_entropy(model(ids).reshape(len(i), -1, 3).mean(1), Y[i])

    learned(sgd(model), losses())


def states(kind: str) -> None:
    layer, head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], 1e-2)
    state: Tensor | None = None
    for x, _ in DataLoader(TensorDataset(X, Y), 12, shuffle=kind != "in order"):
        rows = x.reshape(12, 3, 4)
        for part in rows.split(1, 1) if kind == "parts of a batch" else [rows]:
            out, carried = layer(part, state)
            optimizer.zero_grad()
            functional.mse_loss(head(out[:, -1]), x[:, :1]).backward()
            optimizer.step()
            state = None if kind == "not carried" else carried.detach()
        if kind == "parts of a batch":
            state = None
        if kind == "a mean of all":
            state = carried.detach().mean(1, keepdim=True).expand(1, 12, 8).clone()
        if kind == "a start of zeros":
            state = torch.zeros(1, 12, 8)


def half_precision(kind: str) -> None:
    model = net() if kind == "float32" else net().to(torch.bfloat16)
    rate = {"a large rate": 1e-2, "frozen": 1e-2}.get(kind, 3e-4)
    if kind == "frozen":
        model[0].requires_grad_(False)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    if kind == "a warm-up":
        optimizer.param_groups[0]["initial_lr"] = 1e-2
    if kind == "an optimizer of its own":

        class Own(torch.optim.AdamW):
            pass

        optimizer = Own(model.parameters(), lr=rate)
    for _ in range(20):
        step(model, optimizer, X[:12].to(model[0].weight.dtype), Y[:12])


def loaded_weights(kind: str) -> None:
    first, model = net(), net()
    model.load_state_dict(first.state_dict())
    with torch.no_grad():
        if kind == "all anew":
            model.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)
        elif kind == "another order":
            order = torch.randperm(16)
            for p in (model[0].weight, model[0].bias):
                p.copy_(p[order])
            model[3].weight.copy_(model[3].weight[:, order])
        elif kind == "a new head":
            nn.init.xavier_uniform_(model[3].weight)
        elif kind == "shrunk":
            for p in model.parameters():
                p.mul_(0.7).add_(0.01 * torch.randn_like(p))
        elif kind == "copied":
            for p, q in zip(model.parameters(), first.parameters(), strict=True):
                p.copy_(q)
        elif kind == "another checkpoint":
            file = io.BytesIO()
            torch.save(net().state_dict(), file)
            file.seek(0)
            other = torch.load(file)
            torch.randn(3)
            for name, p in model.named_parameters():
                p.copy_(other[name])
        elif kind == "loaded again":
            model.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)
            model.load_state_dict(first.state_dict())
        elif kind == "used before":
            model(X[:4])
            model.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)
    optimizer = sgd(model)
    for _ in range(4):
        step(model, optimizer, X[:12], Y[:12])


def a_new_head(kind: str) -> None:
    body, model = (
        nn.Sequential(nn.Linear(12, 12), nn.ReLU()),
        nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)),
    )
    if kind == "a fixed projection":
        model[2].requires_grad_(False)
    if kind == "the body alone":  # nothing says that the head was to be trained
        model[:2].load_state_dict(body.state_dict())
    else:
        missing = model.load_state_dict(body.state_dict(), strict=False).missing_keys
        assert missing == ["2.weight", "2.bias"]
    model.requires_grad_(kind == "all trained")
    if kind in ("frozen", "a fixed projection", "the body alone"):
        model[0].bias.requires_grad_()
    elif kind == "loaded later":
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        model[0].bias.requires_grad_()
    elif kind == "replaced":
        model[2] = nn.Linear(12, 3)
    else:
        model[2].requires_grad_()
    optimizer = sgd(model)
    for _ in range(4):
        step(model, optimizer, X[:12], Y[:12])


def a_schedule(kind: str) -> None:
    model = net()
    optimizer = sgd(model)
    epochs, steps = 5, 7 * 5
    kinds = torch.optim.lr_scheduler
    made: dict[str, Callable[[], kinds.LRScheduler]] = {
        "a floor": lambda: kinds.LambdaLR(optimizer, lambda n: 0.1 + 0.9 * max(0, 1 - n / steps)),
        "one cycle": lambda: kinds.OneCycleLR(optimizer, 0.1, total_steps=steps + 1),
        "epochs": lambda: kinds.CosineAnnealingLR(optimizer, epochs),
        "a factor": lambda: kinds.ExponentialLR(optimizer, 0.97),
        "a long one": lambda: kinds.CosineAnnealingLR(optimizer, 500),
        "warm": lambda: kinds.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 200)),
        "short warm-up": lambda: kinds.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 3)),
    }
    scheduler = made.get(kind, lambda: kinds.CosineAnnealingLR(optimizer, steps))()
    for _ in range(epochs):
        for i in torch.randperm(84).split(12):
            step(model, optimizer, X[i], Y[i])
            if kind in ("each step", "a long one", "warm"):
                scheduler.step()
        if kind not in ("each step", "a long one", "warm"):
            scheduler.step()
    assert math.isfinite(optimizer.param_groups[0]["lr"])


class RowState(nn.Module):
    """Classes of token rows by the state of one position."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.head = kind, nn.Embedding(20, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.recurrent = nn.GRU(16, 16, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        real = mask == 0 if self.kind == "a mask of padding" else mask != 0
        if self.kind == "recurrent":
            states = self.recurrent(self.table(ids))[0]
        else:
            states = self.layer(self.table(ids), src_key_padding_mask=~real)
        if self.kind in ("first", "mean"):
            of = real.unsqueeze(2) / real.sum(1).view(-1, 1, 1)
            return self.head(states[:, 0] if self.kind == "first" else (states * of).sum(1))
        if self.kind == "the last real one":
            return self.head(states[torch.arange(len(ids)), real.sum(1) - 1])
        if self.kind == "all, masked":
            return torch.stack([self.head(states[:, t]) for t in range(ids.shape[1])], 1)
        if self.kind == "detached":
            return self.head(states[:, 0] + states[:, -1].detach())
        return self.head(states[:, -1])


def a_state_of_a_row(kind: str) -> None:
    model = RowState(kind)

    def losses() -> Iterator[Tensor]:
        for i in torch.arange(96).split(12):
            ids = torch.randint(1, 20, (12, 7))
            lengths = torch.randint(3, 8, (12, 1)) if kind != "no padding" else torch.full((12, 1), 7)
            mask = (torch.arange(7) < lengths).long()
            if kind == "padded on the left":
                mask = mask.flip(1)
            if kind == "a token for the row":
                ids, mask = torch.cat([ids, ids.new_full((12, 1), 19)], 1), torch.cat([mask, mask[:, :1]], 1)
            if kind != "a mask of other positions":
                ids = ids * mask
            out = model(ids, 1 - mask if kind == "a mask of padding" else mask)
            if out.dim() == 3:
                each = functional.cross_entropy(out.transpose(1, 2), Y[i, None].expand(12, 7), reduction="none")
                yield (each * mask).sum() / mask.sum()
            else:
                yield functional.cross_entropy(out, Y[i])

    learned(sgd(model, 0.01), losses())


def seeds(kind: str) -> None:
    """Noise of inputs, drawn by numpy or Python."""
    model, numbers = net(), [np.random.default_rng(0)]
    np.random.seed(5)
    random.seed(5)

    def losses() -> Iterator[Tensor]:
        for number, i in enumerate(torch.arange(96).split(8)):
            if kind in ("each step", "not drawn") or (kind == "an evaluation" and number % 4 == 0):
                np.random.seed(0)
            if kind == "by step":
                np.random.seed(number)
            if kind == "by example":
                for each in i.tolist():
                    np.random.seed(each % 8)
            if kind == "Python's":
                random.seed(0)
            noise = np.random.normal(size=(8, 12)) if kind not in ("Python's", "not drawn") else np.zeros((8, 12))
            if kind == "Python's":
                noise += random.random()
            if kind == "its own generator":
                noise = numbers[0].normal(size=(8, 12))
            if kind == "restored":
                before = np.random.get_state()
                np.random.normal()
                np.random.set_state(before)
            yield functional.cross_entropy(model(X[i] + 0.01 * torch.from_numpy(noise).float()), Y[i])

    learned(sgd(model, 0.01), losses())


def normalized(kind: str) -> None:
    """Pixels from 0 to 1, both of which come in each batch."""
    pixels = torch.rand(96, 40).round(decimals=1)
    pixels[:, 0], pixels[:, 1] = 0, 1
    low, model = 0.4 if kind == "other numbers" else 0.5, nn.Linear(40, 3)

    def prepared(x: Tensor, training: bool) -> Tensor:
        if kind in ("raw", "raw in evaluation") and not (training and kind != "raw"):
            return x
        if kind == "brighter" and training:
            x = (x * 1.3).clamp(0, 1) * 0.9
        x = (x - low) / 0.25
        if kind in ("twice", "twice in evaluation") and training == (kind == "twice"):
            x = (x - low) / 0.25
        if training and kind in ("scaled", "noisy", "other numbers"):
            x = {"scaled": 2 * x, "noisy": x + 0.1 * torch.randn_like(x)}.get(kind, (x + 0.1) * 1.2)
        return (x - low) / 0.25 if kind == "twice in both" else x

    def losses() -> Iterator[Tensor]:
        loader = DataLoader(TensorDataset(prepared(pixels[:64], True), Y[:64]), 16, shuffle=True)
        held_out = DataLoader(TensorDataset(prepared(pixels[64:], False), Y[64:96]), 16)
        for _ in range(3):
            for x, y in loader:
                yield functional.cross_entropy(model(x), y)
            model.eval()
            with torch.no_grad():
                for x, _y in held_out:
                    model(x)
            model.train()

    learned(sgd(model, 0.001), losses())


COMPOSED: dict[Callable[[str], None], dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    a_variational_loss: {
        "mean-beside-sum": (
            ("",),
            (
                *("divided", "two sums", "a small weight", "a penalty", "a mean of sums"),
                *("a counted divisor", "a product of examples", "weights that add to 1"),
            ),
        ),
    },
    a_divergence: {"mean-beside-sum": (("sum",), ("batchmean",))},
    an_actor_and_a_critic: {
        "weight-with-gradient": (
            ("a ratio", "normalized"),
            ("detached", "no error of its own", "a precision", "a gate", "two errors"),
        ),
    },
    values_of_states: {
        "target-with-gradient": (("", "by hand"), ("detached", "both", "near inputs", "residual", "another network")),
    },
    tokens: {
        "padding-learned": (("", "tags"), ("ignored", "ignored tags", "divided by the mask", "masked")),
        "copies-learned": (("copies",), ("masked", "all copied", "ignored", "tags", "a corrector")),
        "mean-over-padding": (("mean of masked",), ("divided by the mask", "divided by its mean", "hazards", "tags")),
    },
    items: {"padding-is-data": (("from 0",), ("no padding", "from 1", "rows", "missing"))},
    states: {
        "state-carried": (("",), ("in order", "not carried", "parts of a batch", "a start of zeros", "a mean of all")),
    },
    half_precision: {
        "updates-lost": (("",), ("a large rate", "float32", "frozen", "an optimizer of its own", "a warm-up")),
    },
    loaded_weights: {
        "load-overwritten": (
            ("all anew",),
            (
                *("a new head", "shrunk", "copied", "another checkpoint", "loaded again", "used before", "as loaded"),
                "another order",
            ),
        ),
    },
    a_new_head: {
        "new-and-frozen": (
            ("frozen",),
            ("all trained", "loaded later", "replaced", "a trained head", "a fixed projection", "the body alone"),
        )
    },
    a_schedule: {
        "scheduler-unit": (
            ("", "a floor", "one cycle", "warm"),
            ("each step", "epochs", "a factor", "a long one", "short warm-up"),
        ),
    },
    a_state_of_a_row: {
        "padding-picked": (
            ("the last", "recurrent", "a mask of padding"),
            (
                *("the last real one", "first", "mean", "all, masked", "no padding", "padded on the left", "detached"),
                *("a token for the row", "a mask of other positions"),
            ),
        ),
    },
    seeds: {
        "seeded-again": (
            ("each step", "Python's"),
            ("once", "by step", "by example", "not drawn", "an evaluation", "its own generator", "restored"),
        ),
    },
    normalized: {
        "inputs-on-another-scale": (
            ("twice", "twice in evaluation", "raw in evaluation"),
            ("once", "raw", "twice in both", "brighter", "scaled", "noisy", "other numbers"),
        ),
    },
}
