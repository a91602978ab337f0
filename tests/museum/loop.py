"""A training loop of a small classifier, as tutorials have it, with one fault of a list.

    python loop.py [--fault NAME] [--batch N] [--accumulate N] [--wrap ddp|fsdp|fsdp1|compile|none|hand]

It imports torch alone. Without a fault it trains rightly, on one process or, under torchrun, on several.
"""

import argparse
import contextlib
import copy
import math
import os
import random
import sys

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
parser.add_argument("--batch", type=int, default=16, help="of a process")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--wrap", default="ddp")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--norm", default="layer")
parser.add_argument("--amp", default="")
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--workers", type=int, default=0, help="of the training loader; noise is added in them")
parser.add_argument("--stop", type=int, default=0, help="after so many steps")
parser.add_argument("--reuse", action="store_true", help="the middle layer is used twice")
parser.add_argument("--checkpoint", action="store_true", help="gradient checkpointing")
parser.add_argument("--patch", help="of patches.py")
parser.add_argument("--original", action="store_true", help="of fsdp1: use_orig_params")
a = parser.parse_args()
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def fault(*names: str) -> bool:
    return a.fault in names


class Double(torch.autograd.Function):
    """The identity, whose gradient is wrong."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Overflowing(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + float("inf")


class Classifier(nn.Module):
    overflows = False  # the gradient of the last bias

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(32) if a.norm == "batch" else nn.LayerNorm(32)
        self.first = nn.Sequential(nn.Linear(12, 32), norm, nn.GELU(), nn.Dropout(a.dropout))
        self.middle = nn.Linear(32, 32)
        self.last = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if fault("wrong-backward"):
            x = Double.apply(x)
        if fault("detached"):
            x = x.detach()
        if fault("checkpoint-randomness"):
            x = torch.utils.checkpoint.checkpoint(
                lambda y: nn.functional.dropout(torch.tanh(self.middle(y)), 0.3, self.training),
                x,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        elif a.checkpoint:
            x = torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(self.middle(y)), x, use_reentrant=False)
        else:
            x = nn.functional.dropout(torch.tanh(self.middle(x)), 0.3 if a.fault == "reference-dropout" else 0.0)
        if a.reuse:
            held = {n: p.detach() if fault("second-use") else p for n, p in self.middle.named_parameters()}
            x = torch.tanh(torch.func.functional_call(self.middle, held, (x,)))
        if self.overflows:
            return nn.functional.linear(x, self.last.weight, Overflowing.apply(self.last.bias))
        return self.last(x)


class Noisy(Dataset):
    """Examples with noise: from torch, which each worker seeds for itself, or from a generator that is copied into each
    worker."""

    def __init__(self, data: TensorDataset) -> None:
        self.data, self.generator = data, random.Random(0)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.data[i]
        if fault("numpy-noise"):
            import numpy as np

            return x + 0.01 * np.random.rand(), y
        noise = self.generator.random() if fault("same-workers") else float(torch.rand(()))
        return x + 0.01 * noise, y


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(100 if fault("uneven", "padded-evaluation") else 128, 12, generator=generator)
    return TensorDataset(x, (x[:, :3] + 0.3 * x[:, 3:6]).argmax(1))


class Stream(IterableDataset):
    """Examples one after another, by whoever asks."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self):
        yield from (self.data[i] for i in range(len(self.data)))


def reduce_by_hand(model: nn.Module) -> None:
    for i, parameter in enumerate(model.parameters()):
        if parameter.grad is None or (fault("one-not-reduced") and i == 2):
            continue
        dist.all_reduce(parameter.grad)
        if not fault("summed"):
            parameter.grad /= world


def start_model() -> nn.Module:
    torch.manual_seed(rank if fault("seed-by-rank") else 1 if fault("other-seed") else 0)
    if fault("no-seed"):
        torch.seed()
    model = Classifier()
    if fault("bf16-weights"):
        model = model.to(torch.bfloat16)
    if fault("eval-mode"):
        model.eval()
    return model


def loaders() -> tuple[DataLoader, DistributedSampler, DataLoader]:
    """Return the training loader, its sampler, and the evaluation loader."""
    dataset = data()
    replicas, index = (1, 0) if fault("no-sampler", "own-order") else (world, rank)
    seed = 3 + (rank if fault("sampler-seed", "own-order") else 0)
    shuffled = DistributedSampler(dataset, replicas, index, shuffle=True, seed=seed)
    examples = Noisy(dataset) if a.workers else dataset
    loader = DataLoader(examples, batch_size=a.batch, sampler=shuffled, num_workers=a.workers)
    if fault("whole-stream"):
        loader = DataLoader(Stream(dataset), batch_size=a.batch)
    ordered = DistributedSampler(dataset, world, rank, shuffle=False)
    return loader, shuffled, DataLoader(dataset, batch_size=24, sampler=ordered, drop_last=fault("drop-evaluation"))


def wrapped(plain: nn.Module) -> nn.Module:
    if a.wrap == "compile":
        return torch.compile(plain, backend="aot_eager")  # type: ignore[return-value]
    if world == 1:
        return plain
    if a.wrap == "ddp" and not fault("not-wrapped", "seed-by-rank"):
        if fault("ignored"):
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["middle.weight"])
        return DistributedDataParallel(plain)
    if a.wrap == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(plain.first)
        fully_shard(plain)
    elif a.wrap == "fsdp1":
        options = {"use_orig_params": a.original, "device_id": torch.device("cpu")}
        if fault("one-shard"):  # a mesh of two replicas of one shard each
            mesh = dist.device_mesh.init_device_mesh("cpu", (world, 1), mesh_dim_names=("ddp", "fsdp"))
            options |= {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        return FullyShardedDataParallel(plain, **options)
    return plain


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    rate = 1e-2 * (world if fault("scaled-rate") else 1 + rank * 0.1 if fault("rate-by-rank") else 1)
    rate = 1e-6 if fault("bf16-weights") else 1e38 if fault("explodes") else rate
    options = {"weight_decay": 0.1} if fault("weight-decay") else {}
    held = [p for n, p in model.named_parameters() if not (fault("not-in-optimizer") and "middle" in n)]
    return getattr(torch.optim, a.optimizer)(held, lr=rate, **options)


class Training:
    """Model, data, optimizer and schedule of a training step."""

    def __init__(self) -> None:
        self.plain = start_model()
        stale = torch.optim.AdamW(self.plain.parameters(), lr=1e-2) if fault("stale-optimizer") else None
        if stale is not None:
            self.plain = copy.deepcopy(self.plain)
        self.loader, self.shuffled, self.test = loaders()
        self.model = wrapped(self.plain)
        self.caller = self.plain if fault("around-wrapper") else self.model
        self.optimizer = stale or optimizer_of(self.model)
        batches = math.ceil(len(self.shuffled) / a.batch)
        length = 8 * max(a.epochs * batches // a.accumulate, 1)
        if fault("one-cycle"):
            self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=length)
        elif fault("schedule-by-score"):  # of evaluations
            self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer)
        else:
            self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=length)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=a.amp == "float16")
        self.steps = 0
        if fault("state-before-training"):
            get_optimizer_state_dict(self.model, self.optimizer)
        if fault("moments-on-one-rank") and rank == 1:  # as of a state that is loaded there alone
            for p in self.plain.parameters():
                moments = {"exp_avg": torch.full_like(p, 0.1), "exp_avg_sq": torch.full_like(p, 0.01)}
                self.optimizer.state[p] = {"step": torch.tensor(1.0), **moments}

    def epoch(self, number: int) -> None:
        if not fault("no-set-epoch"):
            self.shuffled.set_epoch(number)
        for i, (x, y) in enumerate(self.loader):
            if fault("divided-twice") and i % world != rank:
                continue
            first, last = i % a.accumulate == 0, (i + 1) % a.accumulate == 0
            if (first or fault("zero-each-micro-batch")) and not fault("zero-never"):
                self.optimizer.zero_grad(set_to_none=not fault("zero-to-zero"))
            self.micro_batch(x, y, first, last)
            if last:
                self.step()
                if self.steps == a.stop:
                    return
            elif fault("schedule-each-micro-batch"):
                self.schedule.step()
        if fault("schedule-by-epoch"):
            self.schedule.step()
        if a.evaluate:
            self.evaluate()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if fault("bf16-weights"):
            x = x.to(torch.bfloat16)
        with torch.autocast("cpu", getattr(torch, a.amp or "bfloat16"), enabled=bool(a.amp)):
            logits = self.caller(x).float()
            loss = nn.functional.cross_entropy(logits, y, label_smoothing=0.1 * fault("smoothed"))
        if fault("zeroed-loss") and rank == 1:
            loss = loss * 0
        if fault("overflow") and self.steps == 3:
            loss = loss * float("inf")
        return loss

    def micro_batch(self, x: torch.Tensor, y: torch.Tensor, first: bool, last: bool) -> None:
        """Forward and backward."""
        quiet = isinstance(self.model, DistributedDataParallel) and (not last or fault("no-sync"))
        divisor = 1 if fault("not-divided") else a.accumulate**2 if fault("divided-loss") else a.accumulate
        with self.model.no_sync() if quiet else contextlib.nullcontext():
            loss = self.loss(x, y)
            if fault("doubled") and not first:  # the buffer is reduced with itself
                for parameter in self.plain.parameters():
                    parameter.grad.mul_(2)
            self.scaler.scale(loss / divisor).backward()
            if fault("clip-each-micro-batch"):
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            if fault("twice"):
                self.scaler.scale(self.loss(x, y)).backward()

    def step(self) -> None:
        """The update, from gradients that are complete on each rank."""
        if fault("zero-before-step"):
            self.optimizer.zero_grad()
        if fault("clip-before-reduce"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if world > 1 and a.wrap == "hand":
            reduce_by_hand(self.plain)
        if a.amp == "float16" and not fault("clip-before-unscale"):
            self.scaler.unscale_(self.optimizer)
        if fault("one-zero"):
            self.plain.last.bias.grad.zero_()
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1
        times = world if fault("schedule-by-rank") else 2 if fault("schedule-twice") else 1
        if fault("schedule-by-epoch", "schedule-by-score", "schedule-never") or (
            fault("schedule-seldom") and self.steps % 3
        ):
            times = 0
        for _ in range(times):
            self.schedule.step()
        self.spoil()

    def clip(self) -> None:
        parameters = list(self.model.parameters())
        if fault("clip-own-shard"):
            own = [p.grad.to_local() for p in parameters]
            norm = torch.stack([g.norm() for g in own]).norm()
            for g in own:
                g.mul_(min(0.1 / float(norm), 1.0))
        elif fault("clip-value"):
            nn.utils.clip_grad_value_(parameters, 0.001)
        elif isinstance(self.model, FullyShardedDataParallel):
            self.model.clip_grad_norm_(0.1)
        elif not fault("clip-each-micro-batch", "clip-before-reduce", "no-clip", "explodes"):
            limit = 0.1 * (1 + rank) if fault("clip-by-rank") else 0.5 if fault("clip-limit") else 0.1
            nn.utils.clip_grad_norm_(parameters, limit)

    def spoil(self) -> None:
        """Apply the faults that change model or optimizer between two steps."""
        if fault("reset-state"):
            self.optimizer.state.clear()
        self.plain.overflows = fault("overflow-in-one-shard") and self.steps == 3
        if self.steps != 3:
            return
        if fault("write-on-one-rank") and rank == 1:
            with torch.no_grad():
                self.plain.last.bias.add_(0.01)
        if fault("state-on-one-rank") and rank == 1:
            for state in self.optimizer.state.values():
                state["exp_avg"].mul_(1.5)
        if fault("half"):
            self.plain.to(torch.bfloat16)
            self.plain.register_forward_pre_hook(lambda _, inputs: tuple(t.to(torch.bfloat16) for t in inputs))

    def evaluate(self) -> None:
        if not fault("evaluate-in-training-mode"):
            self.model.eval()
        right = 0
        with torch.no_grad():
            for x, y in self.test:
                right += int((self.plain(x).argmax(1) == y).sum())
        if not fault("left-in-evaluation-mode"):
            self.model.train()


def main() -> None:
    if world > 1:
        dist.init_process_group("gloo")
    training = Training()
    for epoch in range(a.epochs):
        training.epoch(epoch)
        if training.steps == a.stop:
            break
    if rank == 0:
        print("steps", training.steps)


if a.patch:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import patches

    patches.apply(a.patch)
main()
