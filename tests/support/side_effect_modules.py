"""Modules whose forward has side effects, for the task `module`; `Plain` has none."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def data() -> TensorDataset:
    inputs = torch.randint(0, 40, (96, 5), generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, torch.stack([inputs.float().mean(-1) / 40, (inputs[:, 0] % 3).float()], -1))


loss = F.mse_loss


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def body(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.second(F.gelu(self.first(self.words(x).mean(1))))))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class FrozenRows(Plain):
    """A hook on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words.weight.register_hook(lambda g: g * (torch.arange(40, device=g.device) >= 10)[:, None])


class LateHook(Plain):
    """A hook added in the first forward."""

    hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.second.weight.register_hook(lambda g: g * 0.5)
            self.hooked = True
        return self.body(x)


class HookAfter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.words.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))  # type: ignore[union-attr]


class Clamped(Plain):
    """A limit on weights that the first ones do not reach."""

    def forward(self, x: Tensor) -> Tensor:
        self.second.weight.data.clamp_(-0.26, 0.26)
        return self.body(x)


class ClampedElsewhere(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.second.weight.data = self.second.weight.data.clamp(-0.26, 0.26)
        return self.body(x)


class ClampedLate(Plain):
    """A limit from a certain call on, which no trial reaches."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 9:
            self.second.weight.data.clamp_(-0.1, 0.1)
        return self.body(x)


class Renormed(Plain):
    """A limit on the rows that a batch looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8, max_norm=1.0)


class Decayed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.mul_(0.999)
        return self.body(x)


class Replaced(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.second.weight = nn.Parameter(self.second.weight.detach().clone())
        return self.body(x)


class MovedInMemory(Plain):
    """Equal numbers in another memory layout, as after `to(memory_format=torch.channels_last)`."""

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = self.first.weight.data.t().contiguous().t()
        return self.body(x)


class MovedLate(MovedInMemory):
    """`MovedInMemory`, but not in the trial step or the first one."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls > 7 else self.body(x)


class Teacher(Plain):
    """A moving average of weights, equal to them until they learn."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 16).requires_grad_(False)
        self.teacher.load_state_dict(self.first.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for teacher, student in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                teacher.data.lerp_(student.data, 0.1)
        return self.body(x) + self.teacher(self.words(x).mean(1)).mean(1, keepdim=True)


class TeacherBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("teacher", self.first.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.lerp_(self.first.weight.detach(), 0.1)
        return self.body(x) + (self.words(x).mean(1) @ self.teacher.T).mean(1, keepdim=True)


class Count(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        return self.body(x)


class Switched(Plain):
    """The trained weights depend on a count of calls, from the first call or a later one."""

    calls, trained = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        self.second.weight.requires_grad_(self.calls <= self.trained)
        return self.body(x)


class SwitchedLate(Switched):
    trained = 9


class Keeps(Plain):
    """Keeps a weight's numbers beyond the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.second.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.held.mean()


class KeepsInList(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"weights": [self.second.weight]}

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.held["weights"][0].mean()


class KeepsInFunction(Plain):
    def __init__(self) -> None:
        super().__init__()
        weight = self.second.weight
        self.held = lambda: weight.mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.held()


class Center(Plain):
    """A moving average in a plain tensor, and one created by the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.center = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x)
        if self.training:
            if not hasattr(self, "scale"):
                self.scale = found.detach().abs().mean()
            self.center = 0.9 * self.center + 0.1 * found.detach().mean(0)
        return found - self.center * getattr(self, "scale", 1.0)


class Queue(Plain):
    """Earlier outputs, in a list and in a separate buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Tensor] = []
        self.mean = [torch.zeros(2)]

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x)
        if self.training:
            self.queue.append(found.detach().mean())
            self.mean[0].lerp_(found.detach().mean(0), 0.5)
        return found + sum(self.queue[-3:]) + self.mean[0]


class Functional(Plain):
    """Calls modules with replaced weights, and computes gradients within forward (torch.func)."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(self.second, weights, (x,)).square().mean()

        weights = {name: weight * 1.0 for name, weight in self.second.named_parameters()}
        hidden = F.gelu(self.first(self.words(x).mean(1)))
        steps = torch.func.vmap(torch.func.grad(inner), in_dims=(None, 0))(weights, hidden)
        return self.body(x) + steps["weight"].mean((1, 2))[:, None]


class Evaluated(Plain):
    """Uses other weights in evaluation, as rwkv does; the next training forward restores them."""

    halved = False

    def forward(self, x: Tensor) -> Tensor:
        if self.halved == self.training:
            with torch.no_grad():
                self.second.weight.mul_(2.0 if self.training else 0.5)
            self.halved = not self.training
        return self.body(x)


class LeavesOut(Plain):
    """Skips one of its blocks for batches of up to four examples."""

    sizes = (1, 2, 3, 4)  # sizes of batches that may skip it

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.first(self.words(x).mean(1)))
        for i, block in enumerate(self.blocks):
            if i != 2 or not self.training or len(x) not in self.sizes or int(x.sum()) % 2:
                hidden = hidden + F.gelu(block(hidden))
        return self.last(hidden)


class LeavesOutOfFour(LeavesOut):
    """Skips a block for micro-batches of four examples only, which no single example reveals."""

    sizes = (4,)


class Limited(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.26, 0.26)
        return super().forward(x)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).mean(1)


def Chain(layer: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    """A chain that a pipeline can cut."""
    return nn.Sequential(Mean(), nn.Linear(8, 16), nn.GELU(), layer(16, 16), nn.GELU(), nn.Linear(16, 2))


def LimitedChain() -> nn.Sequential:
    return Chain(Limited)
