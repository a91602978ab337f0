"""Sums written as brackets."""

from __future__ import annotations

import torch


def leaf(number: int, shapes: tuple[tuple[int, ...], ...] = ((7, 3), (5,), (1,))) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator) * 10 ** (number % 5 - 2) for shape in shapes]


def bracket(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Reference definition: pair neighbours level by level; an odd one moves up unchanged."""
    while len(leaves) > 1:
        leaves = [leaves[i] + leaves[i + 1] if i + 1 < len(leaves) else leaves[i] for i in range(0, len(leaves), 2)]
    return leaves[0]
