"""The event log: `OUTPUT/events.jsonl` (starts, checkpoints, evaluations, ends, with times) and `OUTPUT/ranks.jsonl`
(seconds of each rank in each phase between log points).

In: events, and each rank's phases at log points. Out: append-only lines, written by rank 0; a step that is trained
twice has two lines. Nothing here holds up training: a line that cannot be written is dropped.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.config.errors import CodedError
from lockstep.config.output_files import open_file, redirected
from lockstep.config.redaction import redact_all
from lockstep.config.sections import LaunchSection, ModelSection
from lockstep.distributed import step_timer
from lockstep.distributed.hardware import processor
from lockstep.distributed.world import World


class EventLog:
    """The event log of one run; `EventLog(None)` writes nothing."""

    def __init__(self, world: World | None, folder: Path | None = None) -> None:
        self._world, self._output = world, folder.resolve() if folder is not None else None
        self._folder = self._output if world is not None and world.is_main else None
        self._pending: tuple[float, int, int, Callable[[], list[list[float]]]] | None = None
        self._last = 0  # step of the last log point
        self._saved: int | None = None  # the step of the newest checkpoint

    def event(self, event: str, step: int, **facts: Any) -> None:
        """Write an event that happened after `step` updates."""
        self._write("events", {"time": round(time.time(), 3), "event": event, "step": step, **facts})
        if event == "start":
            self._last, self._saved = step, step or None

    def saved(self, newest: int | None) -> None:
        """Write a checkpoint event if the newest complete checkpoint has changed."""
        if newest is not None and newest != self._saved:
            self._saved = newest
            self.event("checkpoint", newest)

    def failed(self, caught: BaseException, place: str) -> None:
        """Write that the run ends with an error, without the error's text."""
        code = caught.code if isinstance(caught, CodedError) else None
        self.event("failed", self._last, error=type(caught).__name__, code=code, place=place)

    def times(self, step: int, seconds: Sequence[float]) -> None:
        """Start to gather the ranks' numbers of `StepTimer.report`; `answer` writes them. Collective."""
        self.answer()
        if self._world is not None:
            steps, self._last = step - self._last, step
            self._pending = time.time(), step, steps, self._world.all_gather_numbers(seconds)

    def answer(self) -> None:
        """Write the times gathered last, if any. Collective; does not wait for ranks that have not reached `times`."""
        if self._pending is None:
            return
        (when, step, steps, answer), self._pending = self._pending, None
        ranks = answer()
        columns = {name: [round(rank[i], 6) for rank in ranks] for i, name in enumerate(step_timer.NAMES)}
        columns = {name: each for name, each in columns.items() if any(each)}
        counts = {
            name: [int(rank[len(step_timer.NAMES) + i]) for rank in ranks]
            for i, name in enumerate(step_timer.COMPUTING)
            if name in columns
        }
        line = {"time": round(when, 3), "step": step, "steps": steps, "ranks": len(ranks), "seconds": columns}
        line["micro_batches"] = counts
        self._write("ranks", line)

    def last_times(self, step: int, seconds: Sequence[float]) -> None:
        """Gather, await and write the last times; no later step would. Collective."""
        self.times(step, seconds)
        self.answer()

    def regroup(self, step: int) -> None:
        """Adapt to a new group of ranks after `step` updates: another rank may write, and pending times are dropped."""
        self._pending, self._last = None, step
        if self._world is not None and self._output is not None:
            self._folder = self._output if self._world.is_main else None

    def _write(self, name: str, line: dict[str, Any]) -> None:
        if self._folder is None or redirected(self._folder) is not None:
            return
        with suppress(OSError), open_file(self._folder / f"{name}.jsonl", "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")  # end an incomplete line left by a kill
            file.write((json.dumps(redact_all(line)) + "\n").encode())


def facts(
    launch: LaunchSection,
    model: ModelSection,
    world: World,
    engines: Iterable[str],
    opening: dict[str, str],
    clock: str,
    waits_inside: Sequence[str],
) -> dict[str, Any]:
    """Return the facts of a start: processes, hosts, hardware, versions, git. `engines`: packages that the strategy
    needs. Collective."""
    places = world.all_gather((world.host, _device(world)))
    return {
        "processes": world.size,
        "launch": launched_by(launch),
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "hosts": [host for host, _ in places],
        "devices": [device for _, device in places],
        "threads": world.threads,
        "clock": clock,
        "waits_inside": list(waits_inside) if world.size > 1 else [],
        "versions": versions(model, engines),
        "git": git_state(Path.cwd()) if world.is_main else None,
        "opening": opening,
    }


def launched_by(launch: LaunchSection) -> str:
    """Describe how this rank was started."""
    if "RANK" not in os.environ or multiprocessing.parent_process() is not None:
        return f"launcher {launch.name}"
    for variable, name in (
        ("LOCKSTEP_LAUNCHER", f"launcher {launch.name}"),
        ("SLURM_PROCID", "srun"),
        ("ACCELERATE_MIXED_PRECISION", "accelerate launch"),
        ("TORCHELASTIC_RUN_ID", "torchrun or a compatible launcher"),
    ):
        if variable in os.environ:
            return name
    return "a separate command for each rank"


def versions(section: ModelSection, engines: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results, `engines` among them."""
    versions_of = {"python": platform.python_version()}
    quantizer = "bitsandbytes" if section.quantization else None
    for name in ("lockstep-train", "torch", "transformers", "tokenizers", "datasets", *engines, "peft", quantizer):
        if name is None or (name == "peft" and not section.adapter):
            continue
        with suppress(importlib.metadata.PackageNotFoundError):
            versions_of[name] = importlib.metadata.version(name)
    return versions_of | {"torch": torch.__version__}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit, branch and number of changed files of the repository around a folder; None if there is none."""

    def ask(*words: str) -> str | None:
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                ["git", "-C", str(folder), *words],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=5,
                check=False,
            )
            return done.stdout.strip() if done.returncode == 0 else None
        return None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return None
    changed = ask("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "branch": ask("rev-parse", "--abbrev-ref", "HEAD"),
        "changed": len(changed.splitlines()) if changed is not None else None,
    }


def _device(world: World) -> str:
    """Return the name of the GPU, or of the processor."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"{processor()}, {os.cpu_count()} cores"
