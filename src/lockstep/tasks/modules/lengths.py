"""How long each item is and how many targets it holds: asked once for a whole split, and kept in the cache.

In: a split and the user's functions of an item. Out: an Arrow file with `length` and `targets`, int32 each.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lockstep.config.run import Run, RunError
from lockstep.data.cache import cached, folder_of
from lockstep.tasks.modules import dataset, user_functions


def measured(run: Run, data: Any, places: np.ndarray, each: int, key: str) -> str:
    """The file. `each`: targets of an item where nobody says more. Errors: `RunError`."""
    functions = {name: user_functions.function(run, name) for name in ("length", "targets")}
    columns = {"length": np.ones(len(places), np.int32), "targets": np.full(len(places), each, np.int32)}
    some = {name: call for name, call in functions.items() if call is not None}
    for row, place in enumerate(places if some else ()):
        found = dataset.item(run, data, int(place), -1)
        for name, call in some.items():
            columns[name][row] = _number(run, name, call, found, int(place))
    if not columns["targets"].any():
        raise RunError("task.targets: no item of a split holds a target")

    def make(aside: Path) -> None:
        table = pa.table(columns)
        with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)

    return str(cached(folder_of("tokens") / f"{key}.arrow", make))


def asked(run: Run) -> dict[str, Any]:
    """What decides the numbers beside the items and the user's files, which the cache knows: nothing where no function
    is asked, and all are the same."""
    options = run.task.options
    functions = {key: options[key] for key in ("length", "targets") if options.get(key) is not None}
    made = {key: options[key] for key in ("data", "data_arguments")}
    return functions | made | {"seed": run.seed} if functions else {}


def content(path: str) -> str:
    """A hash of what was measured."""
    with pa.memory_map(path) as mapped:
        table = pa.ipc.open_stream(mapped).read_all()
    seen = hashlib.sha256()
    for name in ("length", "targets"):
        seen.update(table.column(name).to_numpy().astype(np.int32).tobytes())
    return seen.hexdigest()


def _number(run: Run, name: str, function: Any, found: Any, place: int) -> int:
    """Errors: `RunError`."""
    with user_functions.asked(run, name, f" of item {place}"):
        number = int(function(found))
    least = 1 if name == "length" else 0
    if not least <= number < 2**31:
        raise RunError(f"task.{name}: item {place} has {number}; wanted is a whole number of at least {least}")
    return number
