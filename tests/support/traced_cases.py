"""Small trainings: faults, each with a similar correct program, and correct programs of unusual styles.

In: torch. Out: functions, by the code of the expected finding.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset, random_split

X = torch.randn(96, 12, generator=torch.Generator().manual_seed(7))
Y = X[:, :3].argmax(1)
DATA = TensorDataset(X, Y)


def net(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([*model.parameters()], lr=rate, momentum=0.9)


def batches(count: int = 2, data: object = DATA) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield from DataLoader(data, batch_size=12, shuffle=True)  # type: ignore[arg-type]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(x).float(), y).backward()
    optimizer.step()


class Stream(IterableDataset):
    """A stream of all examples, or of a worker's share."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = torch.utils.data.get_worker_info()
        first, every = (0, 1) if self.whole or info is None else (info.id, info.num_workers)
        yield from (DATA[i] for i in range(first, len(DATA), every))


# -- pairs: a fault, and a similar correct program
# ------------------------------------------------------------------------


def loaders_made_anew(wrong: bool) -> None:
    sampler: DistributedSampler = DistributedSampler(DATA, 1, 0)
    model = net()
    optimizer = sgd(model)
    for epoch in range(2):
        if not wrong:
            sampler.set_epoch(epoch)
        for x, y in DataLoader(DATA, batch_size=12, sampler=sampler):
            step(model, optimizer, x, y)


def an_epoch_made_again(wrong: bool) -> None:
    """Right: restarted from its initial weights."""
    model = net()
    optimizer = sgd(model)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for _ in range(2):
        if not wrong:
            model.load_state_dict(start[0])
            optimizer.load_state_dict(start[1])
        for x, y in DataLoader(DATA, batch_size=12, shuffle=True, generator=torch.Generator().manual_seed(3)):
            step(model, optimizer, x, y)


def a_stream_of_workers(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    for x, y in DataLoader(Stream(wrong), batch_size=8, num_workers=2):
        step(model, optimizer, x, y)


def one_batch(wrong: bool) -> None:
    """Right: a trial on one batch requests it once."""
    model, loader = net(), DataLoader(DATA, batch_size=12)
    optimizer = sgd(model)
    x, y = next(iter(loader))
    for _ in range(6):
        step(model, optimizer, *(next(iter(loader)) if wrong else (x, y)))


def a_scaled_loss(wrong: bool) -> None:
    """Right: divided by hand."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = sgd(model, 1e-4)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y)).backward()
        for parameter in () if wrong else model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(scaler.get_scale())
        optimizer.step()


def a_limit_of_scaled_gradients(wrong: bool) -> None:
    """Right: the limit is scaled."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 if wrong else scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()


def clipping_each_part(wrong: bool) -> None:
    """Right: two models, each of them clipped after its own backward."""
    one, other = net(), net()
    optimizer = torch.optim.Adam([*one.parameters(), *other.parameters()])
    for x, y in batches():
        optimizer.zero_grad()
        for model in (one, one) if wrong else (one, other):
            functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def rows_of_a_split(wrong: bool) -> None:
    """Right: rows of the training data are scored as well."""
    train, validation = random_split(DATA, [72, 24])
    model = net()
    optimizer = sgd(model)
    for x, y in batches(2, DATA if wrong else train):
        step(model, optimizer, x, y)
    model.eval()
    with torch.no_grad():
        for part in (validation, train, Subset(train, range(20))):
            for x, _ in DataLoader(part, batch_size=8):
                model(x)


def two_splits(wrong: bool) -> None:
    train = torch.randperm(96)[:72].tolist()
    held = torch.randperm(96)[:24].tolist() if wrong else sorted(set(range(96)) - set(train))
    model = net()
    optimizer = sgd(model)
    for x, y in batches(2, Subset(DATA, train)):
        step(model, optimizer, x, y)
    model.eval()
    with torch.no_grad():
        for x, _ in DataLoader(Subset(DATA, held), batch_size=8):
            model(x)


def frozen_weights(wrong: bool) -> None:
    """Right: unfrozen later."""
    body, head = net(), nn.Linear(3, 3)
    optimizers = sgd(body), sgd(head)
    for i, (x, y) in enumerate(batches()):
        body.requires_grad_(not wrong and i > 8)
        functional.cross_entropy(head(body(x)), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def a_new_head(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    model[3] = nn.Linear(16, 3)
    optimizer = optimizer if wrong else sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)


def a_replaced_model(wrong: bool) -> None:
    """Right: layers are called by `forward`, so that no model is called."""
    model = net()
    optimizer = sgd(model)
    model = copy.deepcopy(model) if wrong else model
    for x, y in batches():
        optimizer.zero_grad()
        out = model(x) if wrong else model[3].forward(functional.relu(model[0].forward(x)))
        functional.cross_entropy(out, y).backward()
        optimizer.step()


def a_loaded_schedule(wrong: bool) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        return model, sgd(model)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)

    model, optimizer = made()
    scheduler = schedule(optimizer)
    for i, (x, y) in enumerate(batches()):
        step(model, optimizer, x, y)
        scheduler.step()
        if i != 4:
            continue
        states = copy.deepcopy([v.state_dict() for v in (model, optimizer, scheduler)])
        model, optimizer = made()
        scheduler = scheduler if wrong else schedule(optimizer)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        scheduler = schedule(optimizer) if wrong else scheduler
        scheduler.load_state_dict(states[2])


def one_region_of_autocast(wrong: bool) -> None:
    """Right: the autocast cache is disabled."""
    model = net()
    optimizer = sgd(model)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=wrong):
        for x, y in batches():
            step(model, optimizer, x, y)


def a_region_for_each_step(wrong: bool) -> None:
    """A disabled outer region keeps the cache of inner ones."""
    model = net()
    optimizer = sgd(model)
    with torch.autocast("cpu", enabled=False):
        for x, y in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(x).float(), y)
            if not wrong:
                torch.clear_autocast_cache()
            loss.backward()
            optimizer.step()


def shapes_of_a_regression(wrong: bool) -> None:
    """Right: differences of all pairs, on purpose."""
    model = nn.Linear(12, 1)
    optimizer = sgd(model, 1e-3)
    for x, y in batches():
        optimizer.zero_grad()
        out, target = model(x), y.float()
        if not wrong:
            out = out.squeeze(-1)
            out, target = out[:, None] - out[None], target[:, None] - target[None]
        functional.mse_loss(out, target).backward()
        optimizer.step()


def softmax_twice(wrong: bool) -> None:
    """Right: log-softmax applied twice, which changes nothing."""
    model = nn.Sequential(net(), nn.Softmax(-1) if wrong else nn.LogSoftmax(-1))
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)


def sigmoid_twice(wrong: bool) -> None:
    model = nn.Linear(12, 1)
    optimizer = sgd(model)
    loss = functional.binary_cross_entropy_with_logits if wrong else functional.binary_cross_entropy
    for x, y in batches():
        optimizer.zero_grad()
        loss(model(x).sigmoid(), (y[:, None] > 0).float()).backward()
        optimizer.step()


def evaluated_in_training_mode(wrong: bool) -> None:
    """Right: dropout is sampled several times per example."""
    train, validation = random_split(DATA, [72, 24])
    model = net(0.2)
    optimizer = sgd(model)
    for _ in range(2):
        for x, y in batches(1, train):
            step(model, optimizer, x, y)
        with torch.no_grad():
            for x, _ in DataLoader(validation, batch_size=8):
                torch.stack([model(x) for _ in range(1 if wrong else 3)])


def left_in_evaluation_mode(wrong: bool) -> None:
    """Right: dropout is off from the start, on purpose."""
    model = net(0.2).train(wrong)
    optimizer = sgd(model)
    for _ in range(2):
        for x, y in batches(1):
            step(model, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            model(X[:8])


def a_rate_of_zero(wrong: bool) -> None:
    """Right: a warm-up from zero."""
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / 6) if wrong else n / 6)
    for x, y in batches():
        step(model, optimizer, x, y)
        scheduler.step()


def no_target_that_counts(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, torch.full_like(y, -100) if wrong else y)


def gradients_kept(wrong: bool) -> None:
    """Right: optimizers step, and zero, in hooks of backward."""
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        if not wrong:
            optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for x, y in batches(3):
        functional.cross_entropy(model(x), y).backward()


def a_schedule_of_another_optimizer(wrong: bool) -> None:
    """Right: two optimizers of the same parameters alternate, and one has a schedule."""
    model = net()
    first, second = sgd(model), torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
    for i, (x, y) in enumerate(batches()):
        step(model, first if i < 4 or (not wrong and i % 2) else second, x, y)
        scheduler.step()


class Wrapper:
    """A library's optimizer that wraps one of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.base, self.param_groups = [optimizer], optimizer.param_groups

    def step(self) -> None:
        self.base[0].step()


class Averaging(torch.optim.Optimizer):
    """An optimizer with the parameters of one that it holds, as ZeroRedundancyOptimizer is: torch calls hooks for
    both."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optim = optimizer

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.optim.step()


def a_schedule_of_a_wrapper(wrong: bool, kind: Callable[[torch.optim.Optimizer], Any] = Wrapper) -> None:
    """Right: the schedule is of the optimizer inside of the one that steps."""
    model = net()
    kept = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(kept, 0.9)
    optimizer = kind(sgd(model) if wrong else kept)
    for i, (x, y) in enumerate(batches()):
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        (optimizer if i else kept).step()
        scheduler.step()


def a_schedule_of_an_averaging_optimizer(wrong: bool) -> None:
    a_schedule_of_a_wrapper(wrong, Averaging)


def a_copy_of_the_model(wrong: bool) -> None:
    model = net()
    target = model if wrong else copy.deepcopy(model)
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)
        target.load_state_dict(model.state_dict())


def a_group_of_a_generator(wrong: bool) -> None:
    model = net()
    body = (p for part in model[:3] for p in part.parameters())
    body = body if wrong else iter([*body])
    assert sum(p.numel() for p in body) or not wrong
    groups = [[*body], [*model[3].parameters()]] if wrong else [[*model[:3].parameters()], [*model[3].parameters()]]
    optimizer = torch.optim.Adam([{"params": group} for group in groups])
    for x, y in batches():
        step(model, optimizer, x, y)


def checkpoints_without_gradients(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = model[0], model[3]

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.body, x, use_reentrant=wrong)
            return self.head(x)

    for x, y in batches():
        step(Whole(), optimizer, x, y)


def scored_by_a_loop(wrong: bool) -> None:
    """Right: unlabelled rows, on whose predictions the model is trained."""
    model = net(0.2)
    optimizer = sgd(model)
    held = X[72:]
    for _ in range(2):
        for x, y in batches(1, TensorDataset(X[:72], Y[:72])):
            step(model, optimizer, x, y)
        with torch.no_grad():
            labels = torch.cat([model(x).argmax(1) for x in held.split(8)])
        if not wrong:
            step(model, optimizer, held, labels)


def logits_without_a_softmax(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model, 1e-3)
    for x, y in batches():
        optimizer.zero_grad()
        functional.nll_loss(model(x) if wrong else model(x).log_softmax(-1), y).backward()
        optimizer.step()


def a_loss_of_probabilities(wrong: bool) -> None:
    model = net()
    optimizer = sgd(model, 1e-3)
    for x, y in batches():
        optimizer.zero_grad()
        out = model(x).softmax(-1) if wrong else (model(x).softmax(-1) + 1e-6).log()
        functional.nll_loss(out, y).backward()
        optimizer.step()


def a_head_that_is_replaced(wrong: bool) -> None:
    """A second optimizer, created before or after the model's head is replaced."""
    model = net()
    optimizer = sgd(model)
    for x, y in batches(1):
        step(model, optimizer, x, y)
    optimizer = sgd(model)
    model[3] = nn.Linear(16, 3)
    if not wrong:
        optimizer = sgd(model)
    for x, y in batches(1):
        step(model, optimizer, x, y)


def labels_that_are_shifted(wrong: bool) -> None:
    """Control: shifted labels, with a loss of the script's own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=1))
    optimizer = sgd(model)
    text = torch.randint(0, 11, (64, 9), generator=torch.Generator().manual_seed(3))
    for rows in text.split(8):
        optimizer.zero_grad()
        ids, labels = rows[:, :-1], rows[:, 1:]
        out = model(input_ids=ids, labels=labels)
        own = functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        (out.loss if wrong else own).backward()
        optimizer.step()


PAIRS: dict[Callable[[bool], None], str] = {
    loaders_made_anew: "same-order",
    an_epoch_made_again: "same-order",
    a_stream_of_workers: "whole-stream",
    one_batch: "one-batch",
    a_scaled_loss: "scaled-step",
    a_limit_of_scaled_gradients: "clip-before-unscale",
    clipping_each_part: "clip-early",
    rows_of_a_split: "trained-on",
    two_splits: "trained-on",
    frozen_weights: "frozen-optimizer",
    a_new_head: "in-no-optimizer",
    a_replaced_model: "stale-optimizer",
    a_loaded_schedule: "scheduler-after-load",
    one_region_of_autocast: "stale-cast",
    a_region_for_each_step: "stale-cast",
    shapes_of_a_regression: "loss-broadcast",
    softmax_twice: "softmax-twice",
    sigmoid_twice: "sigmoid-twice",
    evaluated_in_training_mode: "evaluated-in-training-mode",
    left_in_evaluation_mode: "trained-in-evaluation-mode",
    a_rate_of_zero: "rate-zero",
    no_target_that_counts: "all-zero",
    gradients_kept: "not-zeroed",
    a_schedule_of_another_optimizer: "scheduler-elsewhere",
    a_schedule_of_a_wrapper: "scheduler-elsewhere",
    a_schedule_of_an_averaging_optimizer: "scheduler-elsewhere",
    a_copy_of_the_model: "self-load",
    a_group_of_a_generator: "in-no-optimizer",
    checkpoints_without_gradients: "no-gradient",
    scored_by_a_loop: "evaluated-in-training-mode",
    logits_without_a_softmax: "loss-of-logits",
    a_loss_of_probabilities: "loss-of-probabilities",
    a_head_that_is_replaced: "in-no-optimizer",
    labels_that_are_shifted: "labels-shifted-twice",
}


# -- correct programs that were accused
# -----------------------------------------------------------------------------------


def a_checkpoint_is_read_into_the_model() -> None:
    """Load as torch.distributed.checkpoint does: into the tensors of the model's own state_dict, which is then
    loaded."""
    model = net()
    optimizer = sgd(model)
    kept = copy.deepcopy(model.state_dict())
    for i, (x, y) in enumerate(batches()):
        step(model, optimizer, x, y)
        if i == 2:
            state = model.state_dict()
            for name, tensor in state.items():
                tensor.copy_(kept[name])
            model.load_state_dict(state)
    other = net()
    other.load_state_dict(other.state_dict())  # loaded into a new model


def a_mean_teacher() -> None:
    model = net(0.2)
    teacher = copy.deepcopy(model)
    optimizer = sgd(model)
    for x, y in batches():
        with torch.no_grad():
            target = teacher(x + 0.01)
        optimizer.zero_grad()
        out = model(x)
        (functional.cross_entropy(out, y) + functional.mse_loss(out, target)).backward()
        optimizer.step()


def a_frozen_body() -> None:
    body = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16)).eval().requires_grad_(False)
    model = nn.Sequential(body, nn.Linear(16, 3))
    optimizer = sgd(model[1])
    for x, y in batches():
        step(model, optimizer, x, y)


def two_schedules() -> None:
    models = net(), net()
    optimizers = [sgd(m) for m in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 5) for o in optimizers]
    for x, y in batches():
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, x, y)
        for scheduler in schedulers:
            scheduler.step()


def a_sweep_with_one_seed() -> None:
    for rate in (0.1, 0.01):
        torch.manual_seed(3)
        model = net()
        optimizer = sgd(model, rate)
        for x, y in batches(1):
            step(model, optimizer, x, y)


def cross_validation() -> None:
    for fold in range(3):
        rows = range(96)
        model = net(0.1)
        optimizer = sgd(model)
        for x, y in batches(1, Subset(DATA, [i for i in rows if i % 3 != fold])):
            step(model, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            for x, _ in DataLoader(Subset(DATA, [i for i in rows if i % 3 == fold]), batch_size=8):
                model(x)


def statistics_computed_anew() -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = sgd(model)
    for x, y in batches():
        step(model, optimizer, x, y)
    torch.optim.swa_utils.update_bn(DataLoader(DATA, batch_size=12), model)


def a_compiled_step() -> None:
    model = net()
    optimizer = sgd(model)

    @torch.compile(backend="eager", fullgraph=True)
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y)

    for x, y in batches():
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()


def copies_that_are_written_to() -> None:
    """Copies that are written to, with gradients that stay."""
    copies_in_single_precision(True)


def copies_in_single_precision(in_place: bool = False) -> None:
    """The optimizer holds copies of the model's weights, whose gradients are set by hand after backward."""
    model = net().to(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for x, y in batches():
        model.zero_grad()
        functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters(), strict=True):
                if in_place and master.grad is not None:
                    master.grad.copy_(weight.grad)  # type: ignore[arg-type]
                else:
                    master.grad = weight.grad.float()  # type: ignore[union-attr]
            optimizer.step()
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.copy_(master)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = net(), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale.exp()


def a_scale_updated_by_hand(anew: bool = False) -> None:
    """A scale in no optimizer; `-=` on a module's attribute registers the parameter again."""
    model = Scaled()
    optimizer = sgd(model.inner)
    if anew:
        model.scale = nn.Parameter(torch.ones(()))
    for x, y in batches():
        model.zero_grad()
        step(model, optimizer, x, y)
        with torch.no_grad():
            model.scale -= 0.01 * model.scale.grad


def a_new_scale_updated_by_hand() -> None:
    """A scale updated by hand that is created after the optimizer."""
    a_scale_updated_by_hand(True)


RIGHT = (
    a_scale_updated_by_hand,
    a_new_scale_updated_by_hand,
    copies_in_single_precision,
    copies_that_are_written_to,
    a_checkpoint_is_read_into_the_model,
    a_mean_teacher,
    a_frozen_body,
    two_schedules,
    a_sweep_with_one_seed,
    cross_validation,
    statistics_computed_anew,
    a_compiled_step,
)
