"""The user's own functions: the data sets and the model that they return, and batches of items.

In: the task section, whose keys name the functions. Out: splits, a model, and `Bundle`s, one per micro-batch; or a
`RunError` that names the key. Random draws of an item depend only on the seed, the step and the item's index, not on
the rank or worker. Lengths and target counts of items are computed once and cached.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lockstep.config import plugins
from lockstep.config.run import Run, RunError
from lockstep.config.sections import DataSection, TaskSection
from lockstep.data.arrow_cache import Columns, table_of, write_table
from lockstep.data.batch import IGNORED, MicroBatch
from lockstep.data.cache import cached, discard, folder_of
from lockstep.distributed.randomness import seed_everything, seed_libraries
from lockstep.track.busy import ACTIVITY

SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation"}
SPLITS |= {"val": "validation", "dev": "validation", "test": "test"}
ORDER = ("train", "validation", "test")


@dataclass(frozen=True)
class OwnCode:
    """What the user's functions depend on: their names and arguments, how many items are used, and the seed."""

    task: TaskSection
    data: DataSection
    seed: int

    @classmethod
    def of(cls, run: Run) -> OwnCode:
        return cls(run.task, run.data, run.seed)


def function(code: OwnCode, key: str) -> Any:
    """Import the function that `task.KEY` names; None if the key is not set. A module class, such as a loss, is
    instantiated. Errors: `RunError`."""
    name = code.task.options.get(key)
    if name is None:
        return None
    if "." not in name:
        raise RunError(
            "LS3200", f"task.{key}: {name!r} does not name a file; write my_file.{name} for {name} in my_file.py"
        )
    if name.rpartition(".")[0] not in sys.modules:  # seeds draws at import, alike in every process
        seed_libraries(code.seed)
    try:
        attribute = plugins.attribute(name)
    except plugins.PluginError as error:
        raise RunError(error.code, f"task.{key}: {error.message}") from error
    except Exception as error:
        raise RunError("LS3201", f"task.{key}: cannot import {name}: {error_line(error)}") from error
    if key not in ("model", "data") and isinstance(attribute, type) and issubclass(attribute, nn.Module):
        attribute = attribute()
    if key == "loss" and isinstance(attribute, nn.Module) and any(w.requires_grad for w in attribute.parameters()):
        raise RunError(
            "LS3202",
            f"task.loss: {name} has trainable weights that would not be trained; move them into the model "
            "that task.model builds, and return from forward what the loss needs",
        )
    if key != "data" and not callable(attribute):
        raise RunError("LS3203", f"task.{key}: {name} is a {type(attribute).__name__}; expected a function")
    return attribute


@contextmanager
def user_call(task: TaskSection, key: str, what: str = "") -> Iterator[None]:
    """Context for a call of the user's function. Errors: `RunError`, one line with file and line number."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        raise RunError("LS3204", f"task.{key}: {task.options.get(key)}{what} failed: {error_line(error)}") from error


def error_line(error: BaseException) -> str:
    """Format an error as one line, with its location in the user's code."""
    places = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    where = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"


def _is_library(file: str) -> bool:
    parts = Path(file).parts
    return "site-packages" in parts or "lockstep" in parts[-4:-1] or file.startswith("<")


# -- data ------------------------------------------------------------------------------------------------------------


def data_sets(code: OwnCode) -> tuple[dict[str, tuple[Any, np.ndarray]], bool]:
    """Create the splits, each a map-style data set and the indices that belong to the split, int64; and whether
    validation was held out from train. Python's, numpy's and torch's generators are seeded with the run's seed. Errors:
    `RunError`."""
    seed_libraries(code.seed)
    name, splits = code.task.options["data"], function(code, "data")
    if callable(splits) and (isinstance(splits, type) or not hasattr(splits, "__getitem__")):
        with ACTIVITY.during(f"making the data ({name})"), user_call(code.task, "data"):
            splits = splits(**code.task.options["data_arguments"])
    if isinstance(splits, tuple):
        if not 1 <= len(splits) <= len(ORDER):
            raise RunError(
                "LS3205", f"task.data: {name} returns {len(splits)} values; expected train, validation and test"
            )
        splits = dict(zip(ORDER, splits, strict=False))
    if not isinstance(splits, Mapping):
        splits = {"train": splits}
    if unknown := [key for key in splits if key not in SPLITS]:
        raise RunError(
            "LS3206", f"task.data: {name} returns an unknown split {unknown[0]!r}; known are {', '.join(SPLITS)}"
        )
    if twice := [key for key in splits if any(SPLITS[key] == SPLITS[other] for other in splits if other != key)]:
        raise RunError(
            "LS3221", f"task.data: {name} returns {' and '.join(twice)}, which are the same split; return one of them"
        )
    sets = {SPLITS[key]: _indexed(code, data, f"task.data: the {key} split of {name}") for key, data in splits.items()}
    if "train" not in sets:
        raise RunError("LS3207", f"task.data: {name} returns no train split, only {', '.join(splits)}")
    places = {split: np.arange(min(len(data), code.data.limit or len(data))) for split, data in sets.items()}
    if cut := "validation" not in sets:
        sets["validation"] = sets["train"]
        shuffled = np.random.default_rng(code.seed).permutation(places["train"])
        count = max(1, round(len(shuffled) * code.data.validation_fraction))
        if count >= len(shuffled):
            raise RunError(
                "LS3208",
                f"task.data: {name} returns no validation split, and a single example is too few to hold one "
                "out; return a validation split or more examples",
            )
        places |= {"validation": np.sort(shuffled[:count]), "train": np.sort(shuffled[count:])}
    return {split: (sets[split], places[split].astype(np.int64)) for split in ORDER if split in sets}, cut


def _indexed(code: OwnCode, data: Any, what: str) -> Any:
    """Check that a data set is map-style. Errors: `RunError`."""
    if isinstance(data, DataLoader):
        raise RunError(
            "LS3209",
            f"{what} is a DataLoader; return its data set (`.dataset`) instead. batch_size and micro_batches "
            "form the batches, and task.collate takes its collate_fn",
        )
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping)
    if isinstance(data, IterableDataset) or not indexed:
        raise RunError(
            "LS3210",
            f"{what} is a {type(data).__name__}, which can only be iterated from its start. Training shuffles "
            "at every epoch, splits the order over ranks and resumes in the middle, so it needs access by "
            "index: return a data set with __getitem__ and __len__. Data that fits into memory can be "
            "list(data); larger data can be written once with datasets.Dataset.from_generator and read by "
            "index",
        )
    if len(data) == 0:
        raise RunError("LS3211", f"{what} is empty; return at least one example")
    if getattr(data, "format", {}) and type(data).__module__.startswith("datasets."):
        return data if data.format["type"] else data.with_format("torch")  # lists of numbers as tensors
    return data


# -- the model -------------------------------------------------------------------------------------------------------


def model(code: OwnCode, empty: bool = False) -> nn.Module:
    """Build the model in its initial state, seeded with the run's seed. `empty`: on the meta device. Errors:
    `RunError`."""
    name, build = code.task.options["model"], function(code, "model")
    if isinstance(build, nn.Module):
        raise RunError(
            "LS3212",
            f"task.model: {name} is a model; give the function or class that builds it, so that every process "
            "initialises the same weights",
        )
    seed_libraries(code.seed)
    with ACTIVITY.during(f"building the model ({name})"), user_call(code.task, "model"):
        built = _on_meta(build, code) if empty else build(**code.task.options["model_arguments"])
    if isinstance(built, list | tuple) and built and all(isinstance(part, nn.Module) for part in built):
        built = nn.Sequential(*built)
    if not isinstance(built, nn.Module):
        raise RunError("LS3213", f"task.model: {name} returns a {type(built).__name__}; expected a torch.nn.Module")
    if isinstance(built, torch.jit.ScriptModule) or type(built).__name__ == "OptimizedModule":
        raise RunError(
            "LS3214",
            f"task.model: {name} returns a compiled model; return the module itself, and set model.compile=true",
        )
    return built.to("meta") if empty else built


def _on_meta(build: Any, code: OwnCode) -> Any:
    """Build on the meta device; really, for the caller to move, if an operation failed there. An error that the code
    suppresses counts, too: torch's `orthogonal` would leave out its buffer, and ranks would hold different models."""
    arguments, failures = code.task.options["model_arguments"], _Failures()
    with suppress(Exception):  # code that reads values while building
        with torch.device("meta"), failures:
            built = build(**arguments)
        if not failures.any:
            return built
    seed_libraries(code.seed)
    return build(**arguments)


class _Failures(TorchFunctionMode):
    """Notices operations of torch that raise."""

    any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.any = True
            raise


def measured(code: OwnCode, data: Any, places: np.ndarray, each: int, key: str) -> str:
    """Measure lengths and target counts of all items; return the cached file. `each`: targets per item if
    `task.targets` is not set. Errors: `RunError`."""
    functions = {name: function(code, name) for name in ("length", "targets")}
    columns = {"length": np.ones(len(places), np.int32), "targets": np.full(len(places), each, np.int32)}
    some = {name: call for name, call in functions.items() if call is not None}
    for row, place in enumerate(places if some else ()):
        sample = item(code, data, int(place), -1)
        for name, call in some.items():
            columns[name][row] = _number(code.task, name, call, sample, int(place))
    if not columns["targets"].any():
        raise RunError(
            "LS3215",
            "task.targets: no item of the data has a target, so there is nothing to learn; check the "
            "function task.targets",
        )

    path = folder_of("tokens") / f"{key}.arrow"
    return str(cached(path, lambda aside: write_table(pa.table(columns), aside)))


def asked_lengths(code: OwnCode) -> dict[str, Any]:
    """Options that affect the measured numbers, for the cache key; empty if no measuring function is set."""
    options = code.task.options
    functions = {key: options[key] for key in ("length", "targets") if options.get(key) is not None}
    data_options = {key: options[key] for key in ("data", "data_arguments")}
    return functions | data_options | {"seed": code.seed} if functions else {}


def content(path: str) -> str:
    """Hash of the measured numbers."""
    table = table_of(Path(path))
    digest = hashlib.sha256()
    for name in ("length", "targets"):
        digest.update(table.column(name).to_numpy().astype(np.int32).tobytes())
    return digest.hexdigest()


def _number(task: TaskSection, name: str, function: Any, value: Any, place: int) -> int:
    """Call a measuring function on an item and validate its result. Errors: `RunError`."""
    with user_call(task, name, f" of item {place}"):
        number = int(function(value))
    least = 1 if name == "length" else 0
    if not least <= number < 2**31:
        raise RunError("LS3216", f"task.{name}: item {place} has {number}; expected an integer >= {least}")
    return number


INPUT = "lockstep_batch"  # the one input of the model, see `wrapped_module.py`
_ITEM = 2  # distinguishes seeds of items from those of models and collating


@dataclass(frozen=True)
class Bundle:
    """A user's batch of any type, with the tensor methods that `MicroBatch` uses."""

    batch: Any
    examples: int
    targets: int
    blank: bool = False  # padding micro-batch: its loss is zero
    asks: str = "numbers"  # in evaluation: "numbers", or "generate"

    def to(self, device: Any, non_blocking: bool = False) -> Bundle:
        """Move all tensors, and other objects with a `to` method, to a device."""
        return replace(self, batch=_mapped("to", self.batch, device, non_blocking=non_blocking))

    def pin_memory(self) -> Bundle:
        """Pin the memory of all tensors."""
        return replace(self, batch=_mapped("pin_memory", self.batch))

    def __getitem__(self, first: slice) -> Bundle:
        """For `MicroBatch.blank`: the same batch, marked as padding."""
        return replace(self, blank=True)


def _mapped(method: str, part: Any, *arguments: Any, **named: Any) -> Any:
    """Call a method on every object in a nested batch that has it."""
    if hasattr(part, method):
        return getattr(part, method)(*arguments, **named)
    if isinstance(part, Mapping):
        return {key: _mapped(method, inner, *arguments, **named) for key, inner in part.items()}
    if isinstance(part, list | tuple):
        parts = [_mapped(method, inner, *arguments, **named) for inner in part]
        return type(part)(parts) if type(part) in (list, tuple) else type(part)(*parts)  # the latter: namedtuples
    return part


class Items(Columns):
    """A split: its item indices, and each item's length (1 without `task.length`) and number of targets."""

    def __init__(self, data: Any, places: np.ndarray, path: str, name: str) -> None:
        super().__init__(path)
        self.data, self.places, self.name, self.path = data, places, name, Path(path)
        self.lengths = self.flat("length").astype(np.int32)  # [examples]
        self.targets = self.flat("targets").astype(np.int64)  # [examples]
        if len(places) != len(self):
            raise RunError(
                "LS3217",
                f"task.data: the {name} split had {len(self)} items when it was prepared and has {len(places)} "
                "now; task.data must return the same data in every process",
            )

    @property
    def sides(self) -> list[np.ndarray]:
        return [self.lengths]


def item(code: OwnCode, data: Any, place: int, step: int) -> Any:
    """Return an item, with Python's, numpy's and torch's generators seeded by (seed, step, index). Errors:
    `RunError`."""
    seed_everything(code.seed, step, place, _ITEM)
    with user_call(code.task, "data", f": item {place}"):
        return data[place]


class Batches(Dataset):
    """Data set of worker processes: one batch per (step, micro-batch, rows)."""

    def __init__(self, code: OwnCode, columns: Items) -> None:
        self.code, self.columns = code, columns
        self.collate = function(code, "collate") or default_collate
        self.functions = {name: function(code, name) for name in ("length", "targets")}
        self.compared = np.zeros(len(columns), dtype=bool)

    def __getitem__(self, job: tuple[int, int, np.ndarray]) -> Bundle:
        """Return the batch; for no rows, two examples, which BatchNorm needs. Errors: `RunError`."""
        step, index, rows = job
        blank = len(rows) == 0
        rows = np.zeros(2, dtype=np.int64) if blank else rows
        items = [item(self.code, self.columns.data, int(self.columns.places[row]), step) for row in rows]
        self._compare(rows, items)
        seed_everything(self.code.seed, step, index, 1)
        batch = collated(self.code.task, self.collate, items)
        return Bundle(batch, len(rows), int(self.columns.targets[rows].sum()), blank)

    def _compare(self, rows: np.ndarray, items: list[Any]) -> None:
        """Check that items have the prepared number of targets (the loss divisor) and length (which decides
        micro-batches). Errors: `RunError`."""
        for row, each in zip(rows, items, strict=True):
            if (count := self._measured("targets", each)) not in (None, self.columns.targets[row]):
                explanation = "it must not depend on random numbers"
                if self._again("targets", int(row)) != self.columns.targets[row]:
                    explanation = self._changed()
                raise RunError(
                    "LS3218",
                    f"task.targets: {self._called(row)} has {count} targets now and had {self.columns.targets[row]} "
                    f"when the data was prepared; {explanation}",
                )
            if not self.compared[row]:  # only once: a random length may differ at every read
                self.compared[row] = True
                first = self._measured("length", each)
                if first not in (None, self.columns.lengths[row]):
                    length = self._again("length", int(row))
                    if length != self.columns.lengths[row]:
                        raise RunError(
                            "LS3219",
                            f"task.length: {self._called(row)} has the length {length} now and had "
                            f"{self.columns.lengths[row]} when the data was prepared; {self._changed()}",
                        )

    def _called(self, row: int) -> str:
        return f"item {self.columns.places[row]} of the {self.columns.name} split"

    def _measured(self, name: str, each: Any) -> int | None:
        """`task.length` or `task.targets` of an item; None if not set. Errors: `RunError`."""
        if self.functions[name] is None:
            return None
        with user_call(self.code.task, name):
            return int(self.functions[name](each))

    def _again(self, name: str, row: int) -> int | None:
        """Measure an item with the random draws used in preparation. Errors: `RunError`."""
        return self._measured(name, item(self.code, self.columns.data, int(self.columns.places[row]), -1))

    def _changed(self) -> str:
        """Discard the measured numbers, so that the next start measures all items; return the explanation."""
        discard(self.columns.path)
        return (
            "the data changed since, in items that are not checked at a start. The next start measures all items again"
        )


def collated(task: TaskSection, collate: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    """Collate items to a batch. Errors: `RunError`."""
    try:
        return collate(items)
    except Exception as error:
        if task.options.get("collate") is not None:
            with user_call(task, "collate"):
                raise
        raise RunError(
            "LS3220",
            f"task.data: torch's default_collate cannot make a batch of these items ({error_line(error)}); "
            "set task.collate: my_file.collate, a function that makes a batch from a list of items (and pads "
            "them if their sizes differ)",
        ) from error


def micro_batch(code: OwnCode, columns: Items, rows: np.ndarray, index: int, step: int) -> MicroBatch:
    """The items at `rows` as a micro-batch; a padding micro-batch if there are none. Errors: `RunError`."""
    return placed(columns, rows, index, Batches(code, columns)[step, index, rows])


def in_workers(
    code: OwnCode, columns: Items, jobs: Iterable[tuple[int, int, np.ndarray]], count: int
) -> Iterator[MicroBatch]:
    """Yield the micro-batch of each job, in order, made ahead of time by `count` worker processes. Errors:
    `RunError`."""
    submitted: list[tuple[int, int, np.ndarray]] = []

    def noted() -> Iterator[tuple[int, int, np.ndarray]]:
        for job in jobs:
            submitted.append(job)
            yield job

    loader: Any = DataLoader(
        Batches(code, columns),
        sampler=_Jobs(noted),
        batch_size=None,
        num_workers=count,
        # Fork: no data set is pickled, and workers notice when the rank exits. A fork server would outlive its rank.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        generator=torch.Generator(),  # leaves the rank's generator untouched
    )
    try:
        for bundle in loader:
            _, index, rows = submitted.pop(0)
            yield placed(columns, rows, index, bundle)
    except RunError as caught:  # its message starts with the worker's traceback
        raise RunError.read(caught.message.strip().rpartition("RunError: ")[2]) from None


class _Jobs:
    """Iterable of jobs, as a sampler for `DataLoader`."""

    def __init__(self, jobs: Callable[[], Iterator[Any]]) -> None:
        self.jobs = jobs

    def __iter__(self) -> Iterator[Any]:
        return self.jobs()


def placed(columns: Items, rows: np.ndarray, index: int, bundle: Bundle) -> MicroBatch:
    """Wrap a batch as a micro-batch; each target is a 0 in `targets`: int8 [B, most targets of an example]."""
    counts = torch.from_numpy(columns.targets[rows])[:, None]  # [B, 1]
    real = torch.arange(int(counts.max()) if len(rows) else 1) < counts  # [B, most]
    targets = torch.where(real, 0, IGNORED) if len(rows) else torch.full((1, 1), IGNORED)
    return MicroBatch(index, {INPUT: bundle}, targets.to(torch.int8))  # type: ignore[dict-item]


# -- content of items ------------------------------------------------------------------------------------------------


def seal(code: OwnCode, data: Any, places: np.ndarray, most: int) -> str:
    """Hash of the number of items and the content of some, evenly spaced."""
    digest = hashlib.sha256(f"{len(data)} {len(places)}\n".encode())
    for at in np.unique(np.linspace(0, len(places) - 1, most).astype(np.int64)):
        _hashed(digest, item(code, data, int(places[at]), -1))
    return digest.hexdigest()


def same(first: Any, second: Any) -> bool:
    """Whether two items have equal content."""
    hashes = []
    for each in (first, second):
        digest = hashlib.sha256()
        _hashed(digest, each)
        hashes.append(digest.digest())
    return hashes[0] == hashes[1]


def _hashed(digest: Any, value: Any, depth: int = 6) -> None:
    """Add a value to a hash: tensors, arrays, images, numbers, texts and containers; for other objects, their type and
    attributes."""
    digest.update(f"{type(value).__name__}\n".encode())
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        digest.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, str | bytes | int | float | bool | None):
        digest.update(f"{value!r}\n".encode())
    elif hasattr(value, "tobytes") and not isinstance(value, np.ndarray):  # an image
        digest.update(value.tobytes())
    elif depth:
        attributes = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        parts = enumerate(value) if isinstance(value, list | tuple | np.ndarray) else attributes.items()
        for key, part in parts:
            digest.update(f"{key}\n".encode())
            _hashed(digest, part, depth - 1)
