"""The user's own functions behind a run, and the data sets and the model that they make.

In: the task section, whose keys name them. Out: functions, splits, a model; or a `RunError` that names the key.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lockstep.config import plugins
from lockstep.config.run import Run, RunError
from lockstep.distributed.randomness import seed_libraries

SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation"}
SPLITS |= {"val": "validation", "dev": "validation", "test": "test"}
ORDER = ("train", "validation", "test")


def function(run: Run, key: str) -> Any:
    """What `task.KEY` names, None where it is not given; of a module's class such as a loss, an instance. Errors:
    `RunError`."""
    name = run.task.options.get(key)
    if name is None:
        return None
    if "." not in name:
        raise RunError(f"task.{key}: {name!r} names no file: write my_file.{name} for {name} in my_file.py")
    if name.rpartition(".")[0] not in sys.modules:  # what is drawn at its top is the same in every process
        seed_libraries(run.seed)
    try:
        found = plugins.attribute(name)
    except plugins.PluginError as error:
        raise RunError(f"task.{key}: {error}") from error
    except Exception as error:
        raise RunError(f"task.{key}: cannot import {name}: {error_line(error)}") from error
    if key not in ("model", "data") and isinstance(found, type) and issubclass(found, nn.Module):
        found = found()
    if key == "loss" and isinstance(found, nn.Module) and any(w.requires_grad for w in found.parameters()):
        raise RunError(
            f"task.loss: {name} has weights of its own, which would not be trained: make it a part of the model that "
            "task.model builds, and let forward return what the loss needs"
        )
    if key != "data" and not callable(found):
        raise RunError(f"task.{key}: {name} is a {type(found).__name__}, and wanted is a function")
    return found


@contextmanager
def asked(run: Run, key: str, what: str = "") -> Iterator[None]:
    """Around a call of the user's function. Errors: `RunError`, one line with its file and line."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        raise RunError(f"task.{key}: {run.task.options.get(key)}{what} failed: {error_line(error)}") from error


def error_line(error: BaseException) -> str:
    """An error on one line, and where in the user's code it came up."""
    places = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    where = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"


def _is_library(file: str) -> bool:
    parts = Path(file).parts
    return "site-packages" in parts or "lockstep" in parts[-4:-1] or file.startswith("<")


# -- data ------------------------------------------------------------------------------------------------------------


def data_sets(run: Run) -> tuple[dict[str, tuple[Any, np.ndarray]], bool]:
    """The splits: a map-style data set, and its places that belong to the split, int64; and whether the validation
    split was cut off the training split. Made with the run's seed in Python's, numpy's and torch's generators. Errors:
    `RunError`."""
    seed_libraries(run.seed)
    name, made = run.task.options["data"], function(run, "data")
    if callable(made) and (isinstance(made, type) or not hasattr(made, "__getitem__")):
        with asked(run, "data"):
            made = made(**run.task.options["data_arguments"])
    if isinstance(made, tuple):
        if not 1 <= len(made) <= len(ORDER):
            raise RunError(f"task.data: {name} gives {len(made)} things; wanted are train, validation and test")
        made = dict(zip(ORDER, made, strict=False))
    if not isinstance(made, Mapping):
        made = {"train": made}
    if unknown := [key for key in made if key not in SPLITS]:
        raise RunError(f"task.data: {name} gives a split {unknown[0]!r}; known are {', '.join(SPLITS)}")
    sets = {SPLITS[key]: _indexed(run, data, f"task.data: the {key} split of {name}") for key, data in made.items()}
    if "train" not in sets:
        raise RunError(f"task.data: {name} gives no split train, only {', '.join(made)}")
    places = {split: np.arange(min(len(data), run.data.limit or len(data))) for split, data in sets.items()}
    if cut := "validation" not in sets:
        sets["validation"] = sets["train"]
        shuffled = np.random.default_rng(run.seed).permutation(places["train"])
        count = max(1, round(len(shuffled) * run.data.validation_fraction))
        if count >= len(shuffled):
            raise RunError(f"task.data: {name} gives no validation split, and one example is too few to cut one off")
        places |= {"validation": np.sort(shuffled[:count]), "train": np.sort(shuffled[count:])}
    return {split: (sets[split], places[split].astype(np.int64)) for split in ORDER if split in sets}, cut


def _indexed(run: Run, data: Any, what: str) -> Any:
    """A data set that can be asked for its i-th item. Errors: `RunError`."""
    if isinstance(data, DataLoader):
        raise RunError(
            f"{what} is a DataLoader; give its data set (`.dataset`): batches are made by batch_size and "
            "micro_batches, and task.collate takes its collate_fn"
        )
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping)
    if isinstance(data, IterableDataset) or not indexed:
        raise RunError(
            f"{what} is a {type(data).__name__}, which can only be gone through from its beginning; the order of "
            "training is drawn anew at every epoch, shared out and resumed, so it needs items by number: give a data "
            "set with __getitem__ and __len__. What fits into memory is one as list(data); larger data can be written "
            "to a file once (datasets.Dataset.from_generator) and read from there by number"
        )
    if len(data) == 0:
        raise RunError(f"{what} is empty")
    if getattr(data, "format", {}) and type(data).__module__.startswith("datasets."):
        return data if data.format["type"] else data.with_format("torch")  # lists of numbers as tensors
    return data


# -- the model -------------------------------------------------------------------------------------------------------


def model(run: Run, empty: bool = False) -> nn.Module:
    """As it is before training: its weights drawn with the run's seed. `empty`: on the meta device. Errors:
    `RunError`."""
    name, build = run.task.options["model"], function(run, "model")
    if isinstance(build, nn.Module):
        raise RunError(f"task.model: {name} is a model; give the function or class that makes one, so that every "
                       "process draws the same weights")  # fmt: skip
    seed_libraries(run.seed)
    with asked(run, "model"):
        found = _on_meta(build, run) if empty else build(**run.task.options["model_arguments"])
    if isinstance(found, list | tuple) and found and all(isinstance(part, nn.Module) for part in found):
        found = nn.Sequential(*found)
    if not isinstance(found, nn.Module):
        raise RunError(f"task.model: {name} gives a {type(found).__name__}, and wanted is a torch.nn.Module")
    if isinstance(found, torch.jit.ScriptModule) or type(found).__name__ == "OptimizedModule":
        raise RunError(f"task.model: {name} gives a compiled model; give the module itself")
    return found.to("meta") if empty else found


def _on_meta(build: Any, run: Run) -> Any:
    arguments = run.task.options["model_arguments"]
    try:
        with torch.device("meta"):
            return build(**arguments)
    except Exception:  # code that looks at numbers while it builds has to have some
        return build(**arguments)
