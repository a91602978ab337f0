"""Checkpoints: written aside, synced, renamed, and verified before they are loaded.

In: a strategy's `state()` under the task's own names. Out: `OUTPUT/checkpoints/step-NNNNNN/` with safetensors and
a manifest; nothing in it is pickled. The newest one that verifies is used, and every rank uses the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.data.tokens import Prepared
from lockstep.run import Run, RunError

if TYPE_CHECKING:
    from lockstep.strategies.strategy import Strategy
    from lockstep.world import World

FORMAT = 1
_PARTS = ("model", "optimizer")  # one file each


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself; `hashes` are SHA-256 of its files."""

    format: int
    step: int  # updates done
    steps: int  # updates of the whole run
    arithmetic: dict[str, Any]  # the run's keys that decide the weights
    data: str  # hash of the tokens
    strategy: str
    world_size: int
    device: str
    threads: int
    versions: dict[str, str]
    hashes: dict[str, str]


def folder_of(run: Run) -> Path:
    return run.folder / "checkpoints"


def read_manifest(folder: Path) -> Manifest | None:
    """None when there is none or it cannot be understood."""
    try:
        found = Manifest(**json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.format == FORMAT and f"step-{found.step:06d}" == folder.name else None


def newest_first(run: Run) -> Iterator[tuple[Path, Manifest]]:
    """All checkpoints with a readable manifest; their files are not verified yet."""
    folder = folder_of(run)
    if folder.is_dir():
        for path in sorted(folder.glob("step-*"), key=lambda p: (len(p.name), p.name), reverse=True):
            if (manifest := read_manifest(path)) is not None:
                yield path, manifest


def broken(path: Path, manifest: Manifest) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    for name, wanted in manifest.hashes.items():
        try:
            with open(path / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != wanted:
            return f"{name} does not match its hash"
    return None


def check_resumable(run: Run, prepared: Prepared) -> Manifest | None:
    """The newest manifest of this output folder, if the run may go on from it.

    Errors: `RunError` with the keys that differ, when what decides the weights has changed.
    """
    newest = next(newest_first(run), None)
    if newest is None:
        return None
    manifest = newest[1]
    now, then = run.arithmetic(), manifest.arithmetic
    differing = sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k))
    if differing:
        rows = "\n".join(f"  {k}: {then.get(k)!r} in the checkpoint, {now.get(k)!r} now" for k in differing)
        raise RunError(
            f"{run.folder} holds a checkpoint (step {manifest.step}) of a run with other arithmetic:\n{rows}\n"
            "Go on with the old values, or give another output=FOLDER, or remove the folder"
        )
    if manifest.data != prepared.key:
        raise RunError(
            f"{run.folder} holds a checkpoint (step {manifest.step}) that was trained on other data or with another "
            f"tokenizer: "
            "the contents have changed since. Restore them, or give another output=FOLDER"
        )
    return manifest


def finished(run: Run, manifest: Manifest | None) -> bool:
    """Whether the run has reached its last step and its export is there."""
    return manifest is not None and manifest.step >= manifest.steps and (run.folder / "export" / "config.json").exists()


class Checkpoints:
    """Saves and restores one run."""

    def __init__(self, run: Run, world: World, prepared: Prepared, steps: int) -> None:
        self.run, self.world, self.prepared, self.steps = run, world, prepared, steps
        self.folder = folder_of(run)

    def save(self, step: int, strategy: Strategy) -> None:
        """Write the state after `step` updates. Collective. Errors on rank 0 are raised on every rank."""
        state = strategy.state()
        error = None
        if self.world.is_main:
            try:
                self._write(step, state)
            except Exception as caught:
                error = caught
        if (text := self.world.from_main(None if error is None else f"{type(error).__name__}: {error}")) is not None:
            raise error or OSError(f"rank 0 could not write the checkpoint of step {step}: {text}")

    def resume(self, strategy: Strategy) -> tuple[int, list[str]]:
        """Load the newest checkpoint that verifies. Returns updates done (0: none) and what the user should know.
        Collective."""
        notes: list[str] = []
        chosen: Path | None = None
        step = 0
        if self.world.is_main:
            for path, manifest in newest_first(self.run):
                if (fault := broken(path, manifest)) is not None:
                    notes.append(f"{path.name} is damaged ({fault}) and is not used")
                    continue
                chosen, step = path, manifest.step
                notes += self._differences(manifest)
                break
        step, notes = self.world.from_main((step, notes))
        if step:
            strategy.load_state(self._read(chosen, strategy))
        return step, notes

    def _differences(self, manifest: Manifest) -> list[str]:
        """What differs from the saving run and can change bits: a kind of device, threads, versions."""
        now = self._facts()
        then = {"device": manifest.device, "threads": manifest.threads, **manifest.versions}
        return [
            f"{key} was {then.get(key)} when the checkpoint was made and is {value} now: bits may differ from an "
            f"untouched run"
            for key, value in {"device": now["device"], "threads": now["threads"], **now["versions"]}.items()
            if then.get(key) != value
        ]

    def _facts(self) -> dict[str, Any]:
        import torch
        import transformers

        device = self.world.device
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        return {"device": kind, "threads": self.world.threads, "versions": versions}

    def _write(self, step: int, state: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{step:06d}"
        aside = self.folder / f".{name}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        hashes = {}
        for part in _PARTS:
            tensors = {k: v.detach().cpu().contiguous() for k, v in state.items() if k.startswith(f"{part}.")}
            file = aside / f"{part}.safetensors"
            save_file(tensors, file)
            with open(file, "rb") as written:
                os.fsync(written.fileno())
                hashes[file.name] = hashlib.file_digest(written, "sha256").hexdigest()
        manifest = Manifest(
            format=FORMAT,
            step=step,
            steps=self.steps,
            arithmetic=self.run.arithmetic(),
            data=self.prepared.key,
            strategy=self.run.strategy.name,
            world_size=self.world.size,
            hashes=hashes,
            **self._facts(),
        )
        with open(aside / "manifest.json", "w", encoding="utf-8") as out:
            json.dump(asdict(manifest), out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        final = self.folder / name
        if final.exists():
            shutil.rmtree(final)  # damaged, or it would have been resumed from
        os.rename(aside, final)
        self._point_at(final)
        _sync(self.folder)
        self._prune(final)

    def _point_at(self, final: Path) -> None:
        """`latest` -> the checkpoint, replaced in one move."""
        link = self.folder / ".latest.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        os.replace(link, self.folder / "latest")

    def _prune(self, kept: Path) -> None:
        paths = [path for path, _ in newest_first(self.run)]
        for path in paths[self.run.checkpoint.keep :]:
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".step-*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def _read(self, chosen: Path | None, strategy: Strategy) -> dict[str, Any]:
        """Rank 0 reads, the others receive: the folder need not be shared between machines. Collective."""
        import torch
        import torch.distributed as dist
        from safetensors.torch import load_file

        state: dict[str, Any] = {}
        if chosen is not None:
            for part in _PARTS:
                state |= load_file(chosen / f"{part}.safetensors")
        if self.world.size == 1:
            return state
        layout = self.world.from_main(
            [(k, list(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in state.items()]
        )
        received = {}
        for name, shape, dtype in layout:
            tensor = state[name] if self.world.is_main else torch.empty(shape, dtype=getattr(torch, dtype))
            tensor = tensor.to(self.world.device)
            dist.broadcast(tensor, src=0)
            received[name] = tensor
        return received


def _sync(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
