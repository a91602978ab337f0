"""What data of any size cost: preparing many texts, and starting and stepping over a hundred million examples.

In: how many, and on how many cores. Out: a JSON line each, with processor time and memory; seconds of the wall clock
mean nothing on a machine that does other work. Imports are done before. Examples:
  python benchmarks/data_scale.py prepare --rows 1000000 --cores 1 --task classification
  python benchmarks/data_scale.py map --rows 1000000 --cores 2       datasets.map(num_proc) with the same tokenizer
  python benchmarks/data_scale.py index --rows 100000000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import tiny

from lockstep.config.plugins import find
from lockstep.config.run import Run
from lockstep.data import builtin, cache, tokenizer
from lockstep.data.cache import locked
from lockstep.data.columns import INDEX, index_of
from lockstep.data.prepare import prepare
from lockstep.training.feed import Feed

GPT2 = {"type": "gpt2", "config": {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 256}}


def texts(path: Path, rows: int) -> Path:
    """A Parquet file of short texts (95 characters, 20 tokens) and six labels."""
    if not path.exists():
        made = builtin.emotion(0, train=20_000)["train"]
        draw = random.Random(1)
        with pq.ParquetWriter(path, pa.schema([("text", pa.string()), ("label", pa.int64())])) as out:
            for start in range(0, rows, 50_000):
                chosen = draw.choices(range(20_000), k=min(50_000, rows - start))
                part = {"text": [f"{made['text'][i]} {draw.randrange(1000)}" for i in chosen]}
                out.write_table(pa.table(part | {"label": [made["label"][i] for i in chosen]}))
    return path


class Memory:
    """The most memory that this process and its children held at once and share with no file, above what it was."""

    def __init__(self) -> None:
        self.before, self.most, self._over = self.now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> int:
        own = os.getpid()
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        found = 0
        for pid in (own, *children):
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            found += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
        return found * 1024

    def _look(self) -> None:
        while not self._over.wait(0.5):
            self.most = max(self.most, self.now() - self.before)

    def over(self) -> float:
        """In MiB."""
        self._over.set()
        self._thread.join()
        return round(max(self.most, self.now() - self.before) / 2**20, 1)


def measured(work: Callable[[], Any], rows: int, cores: int) -> dict[str, Any]:
    """Processor time a text, of this process and of its children, and memory."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    memory, own, wall = Memory(), time.process_time(), time.perf_counter()
    work()
    own, wall = time.process_time() - own, time.perf_counter() - wall
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    children = used.ru_utime + used.ru_stime
    each = {"own_us": own / rows * 1e6, "children_us": children / rows * 1e6}
    each |= {"total_us": sum(each.values()), "critical_us": each["own_us"] + each["children_us"] / cores}
    return {k: round(v, 2) for k, v in each.items()} | {"wall_s": round(wall, 1), "mib_above_imports": memory.over()}


def run_of(file: Path, task: str) -> Run:
    data: dict[str, Any] = {"train": str(file), "validation": str(texts(file.with_name("validation.parquet"), 1000))}
    if task == "classification":
        return tiny(data=data | {"max_length": 32})
    values = {"name": "language_modeling", "block_size": 128}
    return tiny(task=values, data=data, model=GPT2, tokenizer={"train": "wordpiece", "vocab_size": 1000})


def known(run: Run, file: Path) -> Run:
    """The same with a tokenizer that is there: training one is another matter."""
    some = pq.ParquetFile(file).read_row_group(0).column("text").slice(0, 20_000).to_pylist()
    with locked("a tokenizer"):
        folder = tokenizer.prepare(run, iter([some]), "some", generative=run.task.name == "language_modeling")
    return run.model_copy(update={"tokenizer": run.tokenizer.model_copy(update={"train": None, "source": str(folder)})})


def preparing(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    file = texts(Path(arguments.texts or folder) / f"{arguments.rows}.parquet", arguments.rows)
    os.environ["LOCKSTEP_CACHE"] = str(folder / "cache")
    run = known(run_of(file, arguments.task), file)
    # The rows as Arrow, which `datasets` makes of any file before anything else: not what is looked at here.
    datasets.load_dataset("parquet", data_files=[str(file)], split="train")
    prepare(run.model_copy(update={"data": run.data.model_copy(update={"limit": 900})}), find("tasks", run.task.name))
    if arguments.what == "map":
        tok, rows = tokenizer.load(str(run.tokenizer.source)), datasets.load_dataset("parquet", data_files=[str(file)])

        def work() -> None:
            rows["train"].map(
                lambda batch: tok(batch["text"], truncation=True, max_length=32),
                batched=True,
                num_proc=arguments.cores,
                load_from_cache_file=False,
            )
    else:

        def work() -> None:
            prepare(run, find("tasks", run.task.name))

    return measured(work, arguments.rows, arguments.cores)


# -- a hundred million -----------------------------------------------------------------------------------------------


def generated(folder: Path, rows: int) -> Path:
    """An index of so many examples, of 1 to 5 tokens each, in shards as lockstep writes them."""
    folder.mkdir()
    draw, files = np.random.default_rng(0), []
    for number, start in enumerate(range(0, rows, 65_536)):
        count = min(65_536, rows - start)
        offsets = np.concatenate([[0], np.cumsum(draw.integers(1, 6, count))]).astype(np.int32)
        ids = pa.ListArray.from_arrays(offsets, draw.integers(5, 500, offsets[-1]).astype(np.int32))
        batch = pa.record_batch({"input_ids": ids, "label": draw.integers(0, 6, count)})
        files.append(folder / f"{number:05d}.arrow")
        with pa.OSFile(str(files[-1]), "wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
            stream.write_batch(batch)
    (folder / INDEX).write_text(json.dumps(index_of(folder, files)))
    return folder


def indexed(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A start and steps over it: milliseconds of processor time, the median of some."""
    os.environ["LOCKSTEP_CACHE"] = str(folder / "cache")
    run = tiny("batch_size=256", "epochs=1", f"data.group_by_length={arguments.group}")
    task: Any = find("tasks", run.task.name)
    prepared = prepare(run, task)
    Feed(run, task(run, prepared), range(8), torch.device("cpu")).make(0)  # imports
    path = generated(folder / "many.arrow", arguments.rows)
    cache.seal(path)
    cache.damage(path)  # all of it is read at its first use on a machine
    prepared = replace(prepared, splits=prepared.splits | {"train": str(path)})
    memory = Memory()
    clock = time.process_time()

    def lap() -> float:
        nonlocal clock
        before, clock = clock, time.process_time()
        return round((clock - before) * 1e3, 2)

    assert not prepared.damages()
    found: dict[str, Any] = {"verify_ms": lap()}
    feed = Feed(run, task(run, prepared), range(8), torch.device("cpu"))
    found["start_ms"] = lap()
    feed.longest()
    found["longest_ms"] = lap()
    feed.make(10**9 - 1)
    found["first_step_ms"] = lap()
    found["mib_start"] = memory.over()
    memory = Memory()
    times: dict[str, list[float]] = {"step_0_ms": [], "step_1e9_ms": []}
    for number in range(arguments.steps):  # in turns
        for name, first in (("step_0_ms", 0), ("step_1e9_ms", 10**9)):
            lap()
            feed.make(first + number)
            times[name].append(lap())
    medians = {name: round(float(np.median(values)), 2) for name, values in times.items()}
    return found | medians | {"mib_steps": memory.over(), "steps_per_epoch": feed.order.steps_per_epoch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["prepare", "map", "index"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--task", choices=["classification", "language_modeling"], default="classification")
    parser.add_argument("--group", type=int, default=1, help="data.group_by_length")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--texts", help="a folder to keep the texts in, for the next time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("HF_DATASETS_CACHE", f"{folder}/datasets")
        found = (indexed if arguments.what == "index" else preparing)(arguments, Path(folder))
    print(json.dumps({k: v for k, v in vars(arguments).items() if k != "texts"} | found))


if __name__ == "__main__":
    main()
