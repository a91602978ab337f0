"""Streamed runs of seconds on generated shards.

In: a folder for shards, and their format. Out: the files, and runs that stream them in small windows.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lockstep.config.run import Run, RunError, load
from lockstep.data.arrow_cache import Columns
from lockstep.data.job import Job
from lockstep.data.prepare import prepare
from lockstep.distributed.world import World
from lockstep.strategies.exact.gradient_sum import share
from lockstep.tasks.classification import Classification
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader
from support.harness import TINY, build_with_feed, digest
from support.task_runs import sentence

SHARDS = 5
Rows = list[dict[str, Any]]
PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}
FORMATS = [".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst", ".parquet", ".tar", ".tar.gz", ".tar.zst"]


def rows_of(count: int, seed: int = 0) -> Rows:
    draw = random.Random(seed)
    return [{"text": f"{sentence(draw)} {seed} {i}", "label": draw.choice(["fear", "joy"])} for i in range(count)]


def write(path: Path, rows: Rows) -> Path:
    """Write a file in the format of its name."""
    name, _, ending = path.name.partition(".")
    plain = f".{ending}".removesuffix(next((p for p in PACKERS if p and path.name.endswith(p)), ""))
    packed = PACKERS[path.suffix if path.suffix in PACKERS else ""]
    if plain == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=17)
    elif plain == ".tar":
        path.write_bytes(packed(archive_of(name, rows)))
    else:
        path.write_bytes(packed("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def archive_of(name: str, rows: Rows) -> bytes:
    """An archive as of WebDataset: a text and a value per row, and an unrelated file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number, row in enumerate(rows):
            files = {"txt": row["text"].encode(), "json": json.dumps(row).encode(), "png": b"\x89PNG\xff"}
            for ending, data in files.items():
                member = tarfile.TarInfo(f"{name}/{number:06d}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def shards(folder: Path, ending: str = ".jsonl", sizes: Iterable[int] = (40, 7, 33, 0, 20)) -> Path:
    """A folder with train shards and a validation split."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        rows = rows_of(size, number)
        if rows or ending != ".parquet":
            write(folder / f"train-{number:02d}{ending}", rows)
    write(folder / "validation.jsonl", rows_of(16, 99))
    return folder


def streamed(folder: Path, *overrides: str, **values: Any) -> Run:
    """A run over a folder's shards. `values`: besides those of `TINY`."""
    data = {"source": str(folder), "stream": True, "stream_window": 24, "max_length": 32} | values.pop("data", {})
    return load(None, list(overrides), TINY | {"data": data} | values)


def task_of(run: Run) -> Any:
    return make_task(Job.of(run).with_data())


def feed_of(run: Run, rank: int = 0, ranks: int = 1) -> StepLoader:
    return StepLoader(task_of(run), share(run.micro_batches, rank, ranks), torch.device("cpu"))


LM: dict[str, Any] = {"task": {"name": "language_modeling", "block_size": 24}}


def mixture(folder: Path) -> dict[str, Any]:
    files = [write(folder / f"{name}.jsonl", rows_of(60, ord(name))) for name in "ab"]
    held = write(folder / "held.jsonl", rows_of(20, 9))
    sources = [{"source": str(file), "weight": [[0, 2], [3, 1 + place]]} for place, file in enumerate(files)]
    return {"sources": [sources[0] | {"validation": str(held)}, sources[1]], "max_length": 32}


def changed(path: Path, how: str) -> None:
    """Change a shard: `other` keeps its size and time."""
    before = path.stat()
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[: before.st_size // 2])
    elif how == "unlike":
        path.write_text(path.read_text().replace("joy", "fun"))
    else:
        path.write_text(path.read_text().replace("dog", "god").replace("the", "eht").replace("runs", "snur"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def trained(world: World, run: Run) -> dict[str, Any]:
    """Steps of two epochs, and the model's weights."""
    _, strategy, feed = build_with_feed(run, world)
    losses = [float(strategy.train_step(batch, 5e-3).loss) for batch in feed.steps(0)]
    weights = strategy.state.export()
    return {"losses": losses, "weights": digest(weights) if weights is not None else None}


SIZES = [40] * 7


SMALL: dict[str, Any] = {"stream_window": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shards(tmp_path / "data", ".jsonl.gz", SIZES)


def refusal(run: Run) -> str:
    """The line that refuses a run's preparation."""
    with pytest.raises(RunError) as caught:
        prepare(run, Classification)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def batches(feed: StepLoader, after: int = 0) -> list[Any]:
    return [
        (b.ids.tolist(), [(m.inputs["input_ids"].tolist(), m.targets.tolist()) for m in b.micro_batches])
        for b in feed.steps(after)
    ]


LISTS = ("input_ids", "target_ids", "targets", "starts", "token_type_ids", "sizes", "stops")


NUMBERS = ("label", "count", "bytes", "words", "chosen", "width")


def examples_of(columns: Columns) -> list[tuple[Any, ...]]:
    lists = [columns.ragged(n) for n in columns.names if n in LISTS]
    flat = [columns.flat(n) for n in columns.names if n in NUMBERS]
    return [
        (*(tuple(each.row(i).tolist()) for each in lists), *(int(each[i]) for each in flat))
        for i in range(len(columns))
    ]
