"""Facts about tensors, stored on the host, so that reading them does not wait for the GPU.

In: the inputs of a micro-batch on the host. Out: facts about a mask, positions or targets, attached to the tensor when
it is copied to the device. Results of operations on the tensor have no facts: a mask that a model modifies is inspected
on the device as usual. On a CPU nothing is attached, because nothing synchronizes.

Letters: B examples, T padded length, N real tokens, n positions with a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TARGETS = "lockstep_targets"  # input name of the targets, for a model that computes its own loss (`task.loss_chunk`)
ATTRIBUTE = "lockstep_facts"
MASKS = ("attention_mask", "decoder_attention_mask")
POSITIONS = "position_ids"


@dataclass(frozen=True)
class RealTokens:
    """Positions of the real tokens in an attention mask [B, T]. Its tensors are on the mask's device, or being copied
    there."""

    lengths: tuple[int, ...]  # of each example
    width: int  # T
    on_the_right: bool  # whether all padding is on the right
    index: Tensor  # int64 [N], into B x T
    ends: Tensor  # int32 [B + 1], into N

    @classmethod
    def of(cls, mask: Tensor) -> RealTokens:
        """Facts of a mask [B, T] of any dtype in host memory."""
        from torch import int32
        from torch.nn.functional import pad

        real = mask.bool()
        lengths = real.sum(1)
        return cls(
            lengths=tuple(lengths.tolist()),
            width=real.shape[1],
            on_the_right=bool((real[:, :-1] >= real[:, 1:]).all()),
            index=real.flatten().nonzero().flatten(),
            ends=pad(lengths.cumsum(0), (1, 0)).to(int32),
        )

    @classmethod
    def everywhere(cls, rows: int, width: int, device: torch.device | str) -> RealTokens:
        """Facts of a batch without padding, created on the device without a copy."""
        import torch

        index = torch.arange(rows * width, device=device)
        ends = torch.arange(0, rows * width + 1, max(width, 1), dtype=torch.int32, device=device)
        return cls((width,) * rows, width, True, index, ends)

    @property
    def full(self) -> bool:
        """Whether there is no padding."""
        return all(length == self.width for length in self.lengths)

    def first(self, rows: int) -> RealTokens:
        """Facts of the first examples."""
        lengths = self.lengths[:rows]
        return replace(self, lengths=lengths, index=self.index[: sum(lengths)], ends=self.ends[: len(lengths) + 1])


@dataclass(frozen=True)
class TextsOfRows:
    """Whether each row of positions [B, T] counts up throughout, as a single text does."""

    single: tuple[bool, ...]

    @classmethod
    def of(cls, positions: Tensor) -> TextsOfRows:
        """Facts of positions in host memory."""
        return cls(tuple((positions[:, 1:] - positions[:, :-1] == 1).all(1).tolist()))

    def first(self, rows: int) -> TextsOfRows:
        """Facts of the first rows."""
        return TextsOfRows(self.single[:rows])


@dataclass(frozen=True)
class TargetPlaces:
    """Positions with a target."""

    index: Tensor  # int64 [n], into the flattened targets; on their device

    @classmethod
    def of(cls, targets: Tensor) -> TargetPlaces:
        """Facts of targets of any shape in host memory."""
        return cls((targets.flatten() >= 0).nonzero().flatten())


Facts = RealTokens | TextsOfRows | TargetPlaces
Kind = TypeVar("Kind", RealTokens, TextsOfRows, TargetPlaces)


def facts(tensor: object, kind: type[Kind]) -> Kind | None:
    """Facts of this kind attached to a tensor, or None."""
    attached = getattr(tensor, ATTRIBUTE, None)
    return attached if isinstance(attached, kind) else None


def attach(tensor: Any, about: Facts) -> Any:
    """Attach facts to a tensor and return it."""
    setattr(tensor, ATTRIBUTE, about)
    return tensor


def _attached(tensor: object) -> Facts | None:
    return getattr(tensor, ATTRIBUTE, None)


def _kind(name: str, value: Any) -> type[Facts] | None:
    """The kind of facts for an input of this name, or None."""
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    if name == TARGETS:
        return TargetPlaces
    if value.dim() != 2:
        return None
    if name in MASKS:
        return RealTokens
    return TextsOfRows if name == POSITIONS else None


def _looked_up(name: str, value: Any) -> Facts | None:
    """Facts attached to an input, or computed from it if it is in host memory."""
    attached = _attached(value)
    kind = _kind(name, value)
    if attached is not None or kind is None or value.device.type != "cpu":
        return attached
    return kind.of(value)


def _copy_tensors(about: Facts, move: Any) -> Facts:
    """Copy of facts with `move` applied to their tensors."""
    if isinstance(about, RealTokens):
        return replace(about, index=move(about.index), ends=move(about.ends))
    return replace(about, index=move(about.index)) if isinstance(about, TargetPlaces) else about


def pinned(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copy inputs and their facts to pinned memory."""
    return _copied(inputs, lambda value: value.pin_memory())


def on_device(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy inputs to a device with their facts; copies may still be in flight."""
    if device.type == "cpu":
        return {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
    return _copied(inputs, lambda value: value.to(device, non_blocking=True))


def _copied(inputs: Mapping[str, Any], move: Any) -> dict[str, Any]:
    copies = {}
    for name, value in inputs.items():
        about = _looked_up(name, value)
        copies[name] = move(value) if about is None else attach(move(value), _copy_tensors(about, move))
    return copies


def blank(inputs: Mapping[str, Any], targets: Tensor) -> dict[str, Any]:
    """The first two examples of some inputs with all targets ignored: `targets`, int64 [2, ...]."""
    copies = {}
    for name, value in inputs.items():
        about = _attached(value)
        if name == TARGETS:
            about = replace(about, index=about.index[:0]) if isinstance(about, TargetPlaces) else None
            copies[name] = targets if about is None else attach(targets.view_as(targets), about)
        else:
            copies[name] = value[:2]
            if isinstance(about, RealTokens | TextsOfRows):
                attach(copies[name], about.first(2))
    return copies
