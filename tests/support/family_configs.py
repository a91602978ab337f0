"""Small configs of model families, and their gradients for texts of several lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


GROUPED = BERT | {"num_attention_heads": 4, "num_key_value_heads": 2}


def batch(lengths: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(seed))
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = 2
    return ids * mask + (1 - mask), mask


def gradients(model: nn.Module, logits: Tensor) -> list[Tensor]:
    (logits.float() * torch.arange(logits.numel()).sin().view_as(logits)).sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
