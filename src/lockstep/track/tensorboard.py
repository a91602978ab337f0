"""TensorBoard event files under `OUTPUT/tensorboard/`.

In: numbers and samples. Out: scalars `train/...` and `eval/...` and texts against the step. Needs the extra
`lockstep-train[tensorboard]`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from lockstep.config.output_files import FolderInside
from lockstep.config.run import Run
from lockstep.track.tracker import End, Sample, Tracker, named


class TensorBoard(Tracker):
    """Tracker for TensorBoard. View: `tensorboard --logdir OUTPUT`."""

    packages = ("tensorboard",)

    def __init__(self, run: Run, options: Any, after: int, run_id: str | None) -> None:
        super().__init__(run, options, after, run_id)
        self._place = FolderInside(run.folder, "tensorboard")  # now: training may be ahead of `open`, in its thread

    def open(self) -> str:
        from torch.utils.tensorboard import RecordWriter

        if (fault := self._place.redirected()) is not None:
            raise OSError(fault)
        folder = self._place.path
        folder.mkdir(parents=True, exist_ok=True)
        fault = self._place.not_of_run("events.out.tfevents.*") if self.after and any(folder.iterdir()) else None
        if fault is not None:
            raise OSError(fault)
        # SummaryWriter reopens its file by name at each flush, from a thread, through any link put there by then.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._records = RecordWriter((folder / name).open("ab"))  # closed by `close`
        self._write(file_version="brain.Event:2")
        if self.after:  # readers drop the events of steps that are repeated
            from tensorboard.compat.proto.event_pb2 import SessionLog

            self._write(step=self.after + 1, session_log=SessionLog(status=SessionLog.START))
        self._records.flush()
        return f"tensorboard --logdir {folder}"

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        from torch.utils.tensorboard.summary import scalar

        if (fault := self._place.redirected()) is not None:
            raise OSError(fault)
        for name, value in named(split, numbers).items():
            self._write(step=step, summary=scalar(name, value))
        self._records.flush()

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        from torch.utils.tensorboard.summary import text

        for number, sample in enumerate(samples):
            value = "\n\n".join(f"**{column}** {value}" for column, value in sample.items())  # Markdown
            self._write(step=step, summary=text(f"eval/sample_{number}", value))
        self._records.flush()

    def close(self, end: End) -> None:
        self._records.close()

    def _write(self, **event: Any) -> None:
        """Append one event, timed now; `event` holds the other fields of TensorBoard's `Event`."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **event).SerializeToString())
