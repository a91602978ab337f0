"""TensorBoard event files under `OUTPUT/tensorboard/`.

In: numbers. Out: scalars `train/...` and `eval/...` against the step. Needs the extra `lockstep-train[tensorboard]`.
"""

from __future__ import annotations

import importlib.util

from lockstep.run import Run, RunError
from lockstep.track.tracker import Tracker


class TensorBoard(Tracker):
    """`tensorboard --logdir OUTPUT` shows them."""

    @classmethod
    def check(cls) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise RunError("track.to: tensorboard is not installed: pip install 'lockstep-train[tensorboard]'")

    def __init__(self, run: Run, after: int) -> None:
        super().__init__(run, after)
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=after + 1 if after else None)

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        place = {"train": "train", "validation": "eval"}.get(split, split)
        for name, value in numbers.items():
            self._writer.add_scalar(f"{place}/{name}", value, step)

    def show(self, step: int, samples: list[str]) -> None:
        for number, text in enumerate(samples):
            self._writer.add_text(f"eval/sample_{number}", text, step)

    def close(self) -> None:
        self._writer.close()
