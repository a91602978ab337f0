"""Damaged checkpoint folders: none is loaded, and no resume crashes on one."""

import dataclasses
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.checkpoint import check_resumable
from lockstep.checkpoint.manifest import Manifest, read_manifest
from support.harness import digest
from support.messages import raises
from support.saving import SHARD, Job, bytes_in, job_of, run_in

DAMAGES = 150


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str], Path]:
    """Four checkpoints with the digests of their states, and the same of a run with another seed."""
    folder, other = (tmp_path_factory.mktemp(name) / "out" for name in ("trained", "other"))
    job, another = Job(run_in(folder, "checkpoint.keep=4")), Job(run_in(other, "checkpoint.keep=4", "seed=1"))
    digests = {step: job.saved() for step in range(1, 5)}
    for _ in range(4):
        another.saved()
    return folder, digests, other


def truncate(path: Path, other: Path, dice: random.Random) -> None:
    file = path / dice.choice([SHARD, "manifest.json"])
    os.truncate(file, dice.randrange(file.stat().st_size))


def flip(path: Path, other: Path, dice: random.Random) -> None:
    file = path / dice.choice([SHARD, "manifest.json"])
    content = bytearray(file.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


def lengthen(path: Path, other: Path, dice: random.Random) -> None:
    with open(path / dice.choice([SHARD, "manifest.json"]), "ab") as file:
        file.write(dice.randbytes(dice.randrange(1, 100)))


def delete(path: Path, other: Path, dice: random.Random) -> None:
    (path / dice.choice([SHARD, "manifest.json"])).unlink()


def empty(path: Path, other: Path, dice: random.Random) -> None:
    (path / dice.choice([SHARD, "manifest.json"])).write_bytes(b"")


def add(path: Path, other: Path, dice: random.Random) -> None:
    """Add files that file browsers, network disks and people leave: no damage."""
    names = ["model.safetensors", f"._{SHARD}", "shard-00002-of-00002.safetensors", ".DS_Store", ".nfs0001"]
    (path / dice.choice(names)).write_bytes(dice.choice([b"", (path / SHARD).read_bytes()]))


def swap(path: Path, other: Path, dice: random.Random) -> None:
    """Replace a file by that of another step."""
    name = dice.choice([SHARD, "manifest.json"])
    shutil.copy(dice.choice([p for p in path.parent.glob("step-*") if p.name < path.name] or [other]) / name, path)


def of_another_run(path: Path, other: Path, dice: random.Random) -> None:
    shutil.copy(other / dice.choice([SHARD, "manifest.json"]), path)


def garbage(path: Path, other: Path, dice: random.Random) -> None:
    kinds = [
        dice.randbytes(200),
        b"[]",
        b"null",
        b"{}",
        b'{"format": 2}',
        b"[" * 100_000,
        b'{"format": 2, "sha256": 1}',
    ]
    (path / "manifest.json").write_bytes(dice.choice(kinds))


def lie(path: Path, other: Path, dice: random.Random) -> None:
    """Write a well-formed manifest with a wrong value."""
    manifest = read_manifest(path)
    assert isinstance(manifest, Manifest)
    changes: list[dict[str, Any]] = [
        {"hashes": {}},
        {"hashes": {SHARD: "0" * 64}},
        {"hashes": manifest.hashes | {"more.safetensors": "0" * 64}},
        {"step": manifest.step + 1},
        {"format": 1},
    ]
    (path / "manifest.json").write_bytes(dataclasses.replace(manifest, **dice.choice(changes)).dump())


def other_kind(path: Path, other: Path, dice: random.Random) -> None:
    """Put a folder or a dangling link in place of a file, or a file in place of the folder."""
    target = path / dice.choice([SHARD, "manifest.json"])
    kind = dice.choice(["folder", "link", "file"])
    if kind == "file":
        shutil.rmtree(path)
        path.write_bytes(b"")
        return
    target.unlink()
    if kind == "folder":
        target.mkdir()
    else:
        target.symlink_to("nowhere")


KINDS: list[Callable[[Path, Path, random.Random], None]] = [
    truncate,
    flip,
    lengthen,
    delete,
    empty,
    add,
    swap,
    of_another_run,
    garbage,
    lie,
    other_kind,
]


@pytest.mark.slow
def test_damaged_checkpoints_are_not_loaded(trained: tuple[Path, dict[int, str], Path], tmp_path: Path) -> None:
    """Seeded damage to the newest checkpoints: each resume falls back to the newest intact one and says why. Without an
    intact one it refuses, and deletes nothing. One strategy loads all states in turn, so nothing of a previous one may
    remain."""
    folder, digests, other = trained
    job, dice = Job(run_in(tmp_path / "out")), random.Random(0)
    fresh, used = digest(job.strategy.state.state_dict()), dict.fromkeys((kind.__name__ for kind in KINDS), 0)
    ends = dict.fromkeys(range(5), 0)
    for i in range(DAMAGES):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "out", symlinks=True)
        damaged = dice.choice([1, 1, 1, 2, 3, 4])  # number of newest checkpoints to damage
        kinds = [KINDS[i % len(KINDS)], *dice.choices(KINDS, k=damaged - 1)]
        for step, kind in zip(range(4, 4 - damaged, -1), kinds, strict=True):
            name = f"step-{step:06d}"
            kind(tmp_path / "out" / "checkpoints" / name, other / "checkpoints" / name, dice)
            used[kind.__name__] += 1
        hurt = {step for step, kind in zip(range(4, 4 - damaged, -1), kinds, strict=True) if kind is not add}
        whole = next((step for step in range(4, 0, -1) if step not in hurt), 0)
        what = f"damage {i}: {[kind.__name__ for kind in kinds]}"
        ends[whole] += 1
        before, content = digest(job.strategy.state.state_dict()), bytes_in(tmp_path / "out")
        if not whole:
            with raises("LS6050") as caught:
                job.opened(job.run).resume(job.strategy.state)
            assert all(f"step-{step:06d}: " in str(caught.value) for step in range(1, 5)), what
            assert bytes_in(tmp_path / "out") == content, what
            assert digest(job.strategy.state.state_dict()) == before, what
            continue
        check_resumable(job_of(job.run))  # the check before a start
        step, notes = job.opened(job.run).resume(job.strategy.state)
        assert step == whole, what
        assert digest(job.strategy.state.state_dict()) == digests[whole], what
        assert [note.split()[0] for note in notes] == [f"step-{s:06d}" for s in range(4, whole, -1)], what
        assert all("\n" not in note and "is not used" in note for note in notes), what
    assert all(used.values())
    assert ends[0]
    assert fresh != digests[1]


def test_a_checkpoint_of_another_run_is_refused(trained: tuple[Path, dict[int, str], Path]) -> None:
    run = run_in(trained[2])
    with raises("LS6051", "seed", "1", "0"):
        check_resumable(job_of(run))
