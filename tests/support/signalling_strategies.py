"""Strategies that send a stop signal at a chosen moment, and a controlling terminal.

In: environment variables. Out: the signal, once, from rank 0: to the user's command ("launcher"), to all of its
processes ("group"), as a terminal does, or to itself ("rank").
"""

from __future__ import annotations

import multiprocessing
import os
import pty
import select
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.config.sections import StrategySection
from lockstep.strategies.allreduce import AllReduce
from lockstep.track.busy import ACTIVITY
from support.command import LOCKSTEP, ended, environment_of, start
from support.forked import Forked
from support.places import TESTS_PATH

MOMENTS = ("step 3", "step 20 evaluated", "evaluation", "export", "closing", "delivered")


def variables(moment: str, number: signal.Signals, target: str = "launcher") -> dict[str, str]:
    path = os.pathsep.join([TESTS_PATH, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "MOMENT": moment, "NUMBER": str(int(number)), "TARGET": target}


class Signalled(AllReduce):
    """`allreduce`, signalled at `$MOMENT`."""

    sent = trained = False
    updates = 0

    def _at(self, moment: str) -> None:
        if not (self.trained or moment.startswith("step")):  # the dry run tries the end, too
            return
        if self.sent or os.environ.get("RANK", "0") != "0" or os.environ.get("MOMENT") != moment:
            return
        self.sent = True
        if "SPOIL" in os.environ:  # from now on no checkpoint can be written
            shutil.rmtree("out/checkpoints", ignore_errors=True)
            Path("out/checkpoints").touch()
        number = int(os.environ["NUMBER"])
        if os.environ["TARGET"] == "group":
            os.killpg(os.getpgid(0), number)
        elif os.environ["TARGET"] == "rank":
            os.kill(os.getpid(), number)
        else:
            launcher = multiprocessing.parent_process()
            os.kill(os.getpid() if launcher is None else int(launcher.pid or 0), number)

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        self._at(f"step {batch.step}")
        self.updates = batch.step + 1
        Signalled.trained = self.updates == self.run.steps  # on the class: read by the last lines
        return super().train_step(batch, learning_rate)

    def forward(self, inputs: Any) -> Any:
        if ACTIVITY.name.startswith("evaluation") and not self.sent:
            self._at("evaluation" if self.trained else f"step {self.updates} evaluated")
            if self.sent:  # the launcher may be slower than the rest of the evaluation
                assert self.world.stop.wait(120), "the signal has not reached rank 0"
        return super().forward(inputs)

    def build(self, task: Any) -> None:
        super().build(task)
        state: Any = self.state
        export = state.export
        state.export = lambda: (self._at("export"), export())[1]

    def close(self) -> None:
        self._at("closing")
        super().close()

    @classmethod
    def inexact_options(cls, section: StrategySection) -> list[str]:
        if Path("out/export").exists():
            cls._at(cls, "delivered")  # type: ignore[arg-type] - the last lines ask the class
        return super().inexact_options(section)


class Terminal:
    """A command in the foreground of its own terminal."""

    def __init__(self, folder: Path, cache: Path, *words: str, **more: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = environment_of(cache, TERM="dumb", **more)
        words = ("lockstep", "train", "run.yaml", *words)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored, and all below
        try:
            self.process = Forked([*words], folder, environment, terminal=os.ttyname(theirs))
        finally:
            signal.signal(signal.SIGINT, before)
        os.close(theirs)
        self.text = ""

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def close(self) -> None:
        """Close the window."""
        os.close(self._ours)

    def read(self, until: Callable[[], bool] = lambda: False, seconds: float = 200) -> None:
        """Output until a condition holds, or until it has ended."""
        while not until():
            readable = select.select([self._ours], [], [], 0.05)[0]
            seconds -= 0 if readable else 0.05
            assert seconds > 0, f"it neither moves nor ends: {self.text}"
            try:
                data = os.read(self._ours, 65536) if readable else b" "
            except OSError:  # the other end is closed
                data = b""
            if not data:
                return
            self.text += data.decode(errors="replace") if readable else ""

    def status(self) -> int:
        return self.process.wait()


def state_of(folder: Path, cache: Path) -> dict[str, Any]:
    """Output of `lockstep status` for `folder/out`."""
    import json

    status, out, err = ended(start([*LOCKSTEP, "status", "out", "--json"], folder, cache))
    assert status == 0, err
    return dict(json.loads(out)["facts"])


assert sys.platform != "win32"
