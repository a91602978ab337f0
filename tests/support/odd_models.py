"""Models that are difficult for engines, as in a user's task: weights used only in some micro-batches or steps, or
never; a transposed weight; an output of an unknown class.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.tasks.classification import Classification

step = 0  # set by the test


class Answer:
    """Neither dataclass nor mapping."""

    __slots__ = ("logits", "more")

    def __init__(self, logits: Tensor, more: Tensor) -> None:
        self.logits, self.more = logits, more


class Odd(nn.Module):
    """Has neither a config nor `tie_weights`."""

    def __init__(self, words: int, labels: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(words, 16), nn.Embedding(300, 16)  # both row-wise
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(40, 16).t() / 4)  # 16 x 40, transposed in memory
        self.head, self.back = nn.Linear(40, labels), nn.Linear(40, labels)
        self.back.weight = self.head.weight  # tied
        self.sometimes, self.early, self.never, self.aside = (nn.Linear(40, 40) for _ in range(4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Answer:
        x = self.embed(input_ids)  # [B, T, 16]
        if self.training and step > 1 and torch.rand([]) < 0.5:
            x = x + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = (x * attention_mask[..., None]).mean(1) @ self.mix  # [B, 40]
        if self.training and step > 1 and torch.rand([]) < 0.5:
            x = x + self.sometimes(x)
        if step == 1:
            x = x + self.early(x)
        return Answer(self.head(x) + self.back(x).flip(0), self.aside(x))


class Task(Classification):
    """Built from the run's seed."""

    def made(self) -> nn.Module:
        torch.manual_seed(self.run.seed)
        return Odd(len(self.tokenizer), len(self.labels))

    def model(self, empty: bool = False) -> nn.Module:
        with torch.device("meta" if empty else "cpu"):
            return self.made()


class Scaled(Odd):
    """`Odd` with a scalar weight."""

    def __init__(self, words: int, labels: int) -> None:
        super().__init__(words, labels)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Answer:
        answer = super().forward(input_ids, attention_mask)
        return Answer(answer.logits * self.scale, answer.more)


class Number(Task):
    def made(self) -> nn.Module:
        torch.manual_seed(self.run.seed)
        return Scaled(len(self.tokenizer), len(self.labels))


class Detached(Task):
    """A loss that depends on no weight."""

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return super().loss_sum(outputs, targets) * 0 + torch.zeros((), requires_grad=True)

    def made(self) -> nn.Module:
        model = super().made()
        model.forward = lambda **inputs: Answer(Odd.forward(model, **inputs).logits.detach(), torch.zeros(()))  # type: ignore[method-assign, arg-type]
        return model


class Either(Odd):
    """Every micro-batch uses one of two layers of equal size."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Answer:
        x = self.layers[int(torch.rand([]) * 2)](self.embed(input_ids))
        return Answer(self.head((x * attention_mask[..., None]).mean(1) @ self.mix), x)


class OneOfTwo(Task):
    def made(self) -> nn.Module:
        torch.manual_seed(self.run.seed)
        return Either(len(self.tokenizer), len(self.labels))


class Doubled(Task):
    """Weights of 64 bits."""

    def made(self) -> nn.Module:
        return super().made().double()
