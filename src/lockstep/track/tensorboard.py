"""TensorBoard event files under `OUTPUT/tensorboard/`.

In: numbers and samples. Out: scalars `train/...` and `eval/...` and texts against the step. Needs the extra
`lockstep-train[tensorboard]`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config.folder_inside import FolderInside
from lockstep.track.tracker import End, Sample, Tracker, named


class TensorBoard(Tracker):
    """Tracker for TensorBoard. View: `tensorboard --logdir OUTPUT`."""

    packages = ("tensorboard",)

    def open(self) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._place = FolderInside(self.run.folder, "tensorboard")
        folder = self._place.path
        # Readers of the files drop events of repeated steps.
        self._writer = SummaryWriter(str(folder), purge_step=self.after + 1 if self.after else None)
        return f"tensorboard --logdir {folder}"

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        if (fault := self._place.led_away()) is not None:
            raise OSError(fault)  # the writer would reopen its file
        for name, value in named(split, numbers).items():
            self._writer.add_scalar(name, value, step)

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        for number, sample in enumerate(samples):
            text = "\n\n".join(f"**{column}** {value}" for column, value in sample.items())  # Markdown
            self._writer.add_text(f"eval/sample_{number}", text, step)

    def close(self, end: End) -> None:
        self._writer.close()
