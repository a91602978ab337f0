"""What data of any size cost: preparing many texts, and starting and stepping over a hundred million examples.

In: how many, and on how many cores. Out: a JSON line each, with processor time and memory; seconds of the wall clock
mean nothing on a machine that does other work. Imports are done before. Examples:
  python benchmarks/data_scale.py prepare --rows 1000000 --cores 1 --task classification
  python benchmarks/data_scale.py map --rows 1000000 --cores 2       datasets.map(num_proc) with the same tokenizer
  python benchmarks/data_scale.py index --rows 100000000
  python benchmarks/data_scale.py table --rows 1000000               all of it beside datasets.map and Trainer's way
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
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

from lockstep.config.plugins import find
from lockstep.config.run import Run
from lockstep.data import builtin, cache, source, tokenizer
from lockstep.data.arrow_cache import INDEX, index_of
from lockstep.data.cache import locked
from lockstep.data.job import Job
from lockstep.data.prepare import prepare
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader
from support.harness import tiny

GPT2 = {"type": "gpt2", "config": {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 256}}


def texts(path: Path, rows: int) -> Path:
    """Write a Parquet file of short texts (95 characters, 20 tokens) with six labels."""
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
    """Peak memory of this process and its children that no file backs, relative to the start."""

    def __init__(self) -> None:
        self.before, self.most, self._over = self.now(), 0, threading.Event()
        self.spent = 0.0  # seconds of CPU time spent on polling
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
        self.spent = time.thread_time()

    def over(self) -> float:
        """Peak in MiB."""
        self._over.set()
        self._thread.join()
        return round(max(self.most, self.now() - self.before) / 2**20, 1)


def measured(work: Callable[[], Any], rows: int, cores: int) -> dict[str, Any]:
    """CPU time per text, of this process and its children, and memory."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    memory, own, wall = Memory(), time.process_time(), time.perf_counter()
    work()
    own, wall = time.process_time() - own, time.perf_counter() - wall
    held = memory.over()
    own -= memory.spent
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    children = used.ru_utime + used.ru_stime
    each = {"own_us": own / rows * 1e6, "children_us": children / rows * 1e6}
    each |= {"total_us": sum(each.values()), "critical_us": each["own_us"] + each["children_us"] / cores}
    return {k: round(v, 2) for k, v in each.items()} | {"wall_s": round(wall, 1), "mib_above_imports": held}


def run_of(file: Path, task: str) -> Run:
    data: dict[str, Any] = {"train": str(file), "validation": str(texts(file.with_name("validation.parquet"), 1000))}
    if task == "classification":
        return tiny(data=data | {"max_length": 32})
    values = {"name": "language_modeling", "block_size": 128}
    return tiny(task=values, data=data, model=GPT2, tokenizer={"train": "wordpiece", "vocab_size": 1000})


def known(run: Run, file: Path) -> Run:
    """Measure with an existing tokenizer: training one is measured elsewhere."""
    some = pq.ParquetFile(file).read_row_group(0).column("text").slice(0, 20_000).to_pylist()
    with locked("a tokenizer"):
        folder = tokenizer.prepare(
            tokenizer.TokenizerChoice.of(run), iter([some]), "some", generative=run.task.name == "language_modeling"
        )
    return run.model_copy(update={"tokenizer": run.tokenizer.model_copy(update={"train": None, "source": str(folder)})})


def preparing(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    file = texts(Path(arguments.texts or folder) / f"{arguments.rows}.parquet", arguments.rows)
    os.environ["LOCKSTEP_CACHE"] = str(folder / "cache")
    run = known(run_of(file, arguments.task), file)
    # The rows as Arrow, which `datasets` makes of any file first; not part of the measurement.
    source.load(run.data, run.seed)
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
    """Write an index of that many examples, of 1 to 5 tokens each, in lockstep's shard format."""
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
    """Measure a start and steps over the index: median milliseconds of CPU time."""
    os.environ["LOCKSTEP_CACHE"] = str(folder / "cache")
    run = tiny("batch_size=256", "epochs=1", f"data.group_by_length={arguments.group}")
    job = Job.of(run).with_data()
    prepared = job.data
    StepLoader(make_task(job), range(8), torch.device("cpu")).make(0)  # imports
    path = generated(folder / "many.arrow", arguments.rows)
    cache.seal(path)
    cache.damage(path)  # forces a full read, as at the first use on a machine
    prepared = replace(prepared, splits=prepared.splits | {"train": str(path)})
    memory = Memory()
    clock = time.process_time()

    def lap() -> float:
        nonlocal clock
        before, clock = clock, time.process_time()
        return round((clock - before) * 1e3, 2)

    assert not prepared.damages()
    found: dict[str, Any] = {"verify_ms": lap()}
    feed = StepLoader(make_task(replace(job, prepared=prepared)), range(8), torch.device("cpu"))
    found["start_ms"] = lap()
    feed.longest()
    found["longest_ms"] = lap()
    feed.make(10**9 - 1)
    found["first_step_ms"] = lap()
    found["mib_start"] = memory.over()
    memory = Memory()
    times: dict[str, list[float]] = {"step_0_ms": [], "step_1e9_ms": []}
    for number in range(arguments.steps):  # interleaved
        for name, first in (("step_0_ms", 0), ("step_1e9_ms", 10**9)):
            lap()
            feed.make(first + number)
            times[name].append(lap())
    medians = {name: round(float(np.median(values)), 2) for name, values in times.items()}
    return found | medians | {"mib_steps": memory.over(), "steps_per_epoch": feed.order.steps_per_epoch}


# -- beside others ---------------------------------------------------------------------------------------------------

WAYS = {
    "lockstep": "lockstep",
    "map": "`datasets.map(tokenize, batched=True, num_proc=N)`",
    "trainer": "Trainer's way: `run_glue.py`, padded to max_length",
}
MAX_LENGTH, AT_ONCE = 32, 8  # tokens per text; examples per step (Trainer's default)


def one_way(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the way from the Parquet files to a step's examples, without imports. `folder`: for caches, which are
    kept."""
    file = texts(Path(arguments.texts) / f"{arguments.rows}.parquet", arguments.rows)
    small = texts(file.with_name("validation.parquet"), 1000)
    os.environ["LOCKSTEP_CACHE"] = str(folder / "lockstep")
    run = known(run_of(file, "classification"), file)
    run = run.model_copy(update={"batch_size": AT_ONCE})
    tok = tokenizer.load(str(run.tokenizer.source))
    datasets.disable_progress_bars()
    made: dict[str, Any] = {}
    rows_of = {"first": file, "warm": small}

    def lockstep(which: str) -> None:
        data = run.data.model_copy(update={"train": str(rows_of[which]), "decontaminate": False})
        made["run"] = run.model_copy(update={"data": data})
        made["prepared"] = prepare(made["run"], find("tasks", "classification"))

    def mapped(which: str, padding: bool | str = False) -> None:
        found = datasets.load_dataset("parquet", data_files={"train": str(rows_of[which]), "validation": str(small)})

        def preprocess(examples: dict[str, list]) -> Any:
            result = tok(examples["text"], padding=padding, max_length=MAX_LENGTH, truncation=True)
            result["label"] = examples["label"]
            return result

        processes = arguments.cores if arguments.cores > 1 else None
        made["rows"] = found.map(preprocess, batched=True, num_proc=processes, load_from_cache_file=True)

    works: dict[str, Callable[[str], None]] = {
        "lockstep": lockstep,
        "map": mapped,
        "trainer": lambda which: mapped(which, "max_length"),
    }
    resume = {"lockstep": _resume_lockstep, "trainer": _resume_trainer}.get(arguments.way)
    works[arguments.way]("warm")  # imports
    if resume is not None:
        resume(made, 1000, folder)
    found = measured(lambda: works[arguments.way]("first"), arguments.rows, arguments.cores)
    return found if resume is None else found | {"resume_ms": resume(made, arguments.rows, folder)}


def _step_late(rows: int) -> int:
    """A step in the middle of the epoch that contains step 10^6."""
    epoch = -(-rows // AT_ONCE)
    return 10**6 // epoch * epoch + epoch // 2


def _resume_lockstep(made: dict[str, Any], rows: int, folder: Path) -> float:
    """Milliseconds of CPU time until the examples of a late step are available."""
    clock = time.process_time()
    task: Any = find("tasks", "classification")
    StepLoader(task(made["run"], made["prepared"]), range(AT_ONCE), torch.device("cpu")).make(_step_late(rows))
    return round((time.process_time() - clock) * 1e3, 1)


def _resume_trainer(made: dict[str, Any], rows: int, folder: Path) -> float:
    """The time that `Trainer.train(resume_from_checkpoint=...)` needs for the same (transformers 5)."""
    from accelerate import skip_first_batches
    from transformers import Trainer, TrainingArguments, default_data_collator

    given = {"per_device_train_batch_size": AT_ONCE, "use_cpu": True, "report_to": "none"}
    args = TrainingArguments(str(folder / "out"), remove_unused_columns=False, **given)
    train = made["rows"]["train"].remove_columns("text")
    trainer = Trainer(torch.nn.Linear(1, 1), args, default_data_collator, train)
    epoch, within = divmod(_step_late(rows), -(-len(train) // AT_ONCE))
    clock = time.process_time()
    loader = skip_first_batches(trainer.get_train_dataloader(), within)
    loader.set_epoch(epoch)
    next(iter(loader))
    return round((time.process_time() - clock) * 1e3, 1)


def table(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run each way with each number of processes in its own process, then again with warm caches."""
    held = Path(arguments.texts or folder)
    held.mkdir(parents=True, exist_ok=True)
    lines = ["| way | processes | us a row, all processes | until done | MiB above imports | again, ms | resume, ms |"]
    lines.append("|---|---|---|---|---|---|---|")
    for way in arguments.ways:
        for cores in (1, 2):
            caches = folder / f"{way}-{cores}"
            caches.mkdir()
            command = [sys.executable, __file__, "way", "--way", way, "--rows", str(arguments.rows)]
            command += ["--cores", str(cores), "--texts", str(held), "--caches", str(caches)]
            both = []
            for _ in range(2):
                done = subprocess.run(
                    command, env=os.environ | {"HF_DATASETS_CACHE": f"{caches}/hf"}, stdout=subprocess.PIPE, check=True
                )
                both.append(json.loads(done.stdout.splitlines()[-1]))
                print(json.dumps(both[-1]), file=sys.stderr, flush=True)
            first, again = both
            lines.append(
                f"| {WAYS[way]} | {cores} | {first['total_us']:.1f} | {first['critical_us']:.1f} | "
                f"{first['mib_above_imports']:,.0f} | {again['total_us'] * arguments.rows / 1e3:,.0f} | "
                f"{again.get('resume_ms', '')} |"
            )
    print("\n".join(lines))
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["prepare", "map", "index", "way", "table"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--task", choices=["classification", "language_modeling"], default="classification")
    parser.add_argument("--group", type=int, default=1, help="data.group_by_length")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--texts", help="a folder to keep the texts in, for the next time")
    parser.add_argument("--way", choices=list(WAYS), default="lockstep")
    parser.add_argument("--ways", choices=list(WAYS), nargs="+", default=list(WAYS), help="of a table")
    parser.add_argument("--caches", help="a folder for what a way keeps, for the next time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("HF_DATASETS_CACHE", f"{folder}/datasets")
        work = {"index": indexed, "way": one_way, "table": table}.get(arguments.what, preparing)
        found = work(arguments, Path(arguments.caches or folder))
    kept = {k: v for k, v in vars(arguments).items() if k not in ("texts", "caches", "ways")}
    if found:
        print(json.dumps(kept | found))


if __name__ == "__main__":
    main()
