"""How much has come of what the Hub is asked for, for whoever shows where the program is.

In: a Hub id, and `with` around the call that loads it. Out: `ACTIVITY`, twice a second. What comes is seen from
outside, as files that grow in the Hub's cache: the libraries' own bars draw over one another and over ours.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from lockstep.config.run import RunError
from lockstep.distributed.activity import ACTIVITY


@contextmanager
def downloading(source: str, kind: Literal["model", "dataset"]) -> Iterator[None]:
    """While the Hub is asked for `source`; nothing is said of a local folder."""
    place = ACTIVITY.name
    if Path(source).is_dir():
        ACTIVITY.at(f"reading {source}")
        yield
        ACTIVITY.at(place)
        return
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"{kind}s--{source.replace('/', '--')}" / "blobs"
    before, over = _bytes_in(folder), threading.Event()
    ACTIVITY.at(f"loading {source}")

    def watch() -> None:
        while not over.wait(0.5):
            if (come := _bytes_in(folder) - before) > 0:
                ACTIVITY.at(f"downloading {source}, {come / 1e6:,.1f} MB so far")

    watcher = threading.Thread(target=watch, name="lockstep-download", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        ACTIVITY.at(place)


def _bytes_in(folder: Path) -> int:
    """Of all files of a repository in the Hub's cache, whole or growing."""
    total = 0
    with suppress(OSError):
        for file in folder.iterdir():
            with suppress(OSError):  # renamed meanwhile
                total += file.stat().st_size
    return total


@contextmanager
def reading_weights(source: str) -> Iterator[None]:
    """Errors: `RunError` in place of what libraries raise of files of weights that are damaged, or hold more than
    weights."""
    from safetensors import SafetensorError

    try:
        yield
    except Exception as error:
        held = isinstance(error, pickle.UnpicklingError)
        if not held and not isinstance(error, SafetensorError | EOFError) and "PytorchStreamReader" not in str(error):
            raise
        text = f"they are damaged ({' '.join(str(error).split())[:160] or type(error).__name__})"
        text = "a pickle of more than tensors is not loaded, because it may run code" if held else text
        raise RunError(
            f"model.source: the weights of {source} cannot be read: {text}. Fetch them again, or save the model as "
            "safetensors where it can be trusted"
        ) from error
