"""TensorBoard event files under `OUTPUT/tensorboard/`.

In: numbers. Out: scalars `train/...` and `eval/...` against the step. Needs the extra `lockstep-train[tensorboard]`.
"""

from __future__ import annotations

from lockstep.run import Run, RunError
from lockstep.track.tracker import Tracker


class TensorBoard(Tracker):
    """`tensorboard --logdir OUTPUT` shows them."""

    def __init__(self, run: Run, after: int) -> None:
        super().__init__(run, after)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RunError(
                f"track.to: tensorboard is not installed ({error}): pip install 'lockstep-train[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=after + 1 if after else None)

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        place = {"train": "train", "validation": "eval"}.get(split, split)
        for name, value in numbers.items():
            self._writer.add_scalar(f"{place}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()
