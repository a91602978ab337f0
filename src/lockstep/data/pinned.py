"""Shards of the Hub's, at one commit: what a stream reads must stay as it is until the run is over, and after.

In: a `data` section with `stream`. Out: the same with addresses that name a commit; a repository's name becomes the
address of it, and its splits the files that `datasets` finds in it. Asks the Hub.
"""

from __future__ import annotations

import re
from typing import Any

from lockstep.config.data_sources import address_of, is_address
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data.hub_errors import explained

_COMMIT = re.compile(r"[0-9a-f]{40}")
_KEYS = ("source", "train", "validation", "test")


def addresses(data: DataSection) -> DataSection:
    """With a commit in each address of the Hub. Errors: `RunError`."""
    commits: dict[str, str] = {}

    def at(value: Any) -> Any:
        if isinstance(value, list):
            return [at(each) for each in value]
        if not is_address(value) or not value.lower().startswith("hf://"):
            return value
        try:
            address = address_of(value)
        except ValueError as error:
            raise RunError(f"data.train: {error}") from None
        repository, _, revision = address.place.removeprefix("datasets/").partition("@")
        if _COMMIT.fullmatch(revision):
            return value
        if address.place not in commits:
            commits[address.place] = _commit(repository, revision or None, value)
        path = f"/{address.path}" if address.path else ""
        return f"hf://datasets/{repository}@{commits[address.place]}{path}" + "/" * value.endswith("/")

    return data.model_copy(update={key: at(getattr(data, key)) for key in _KEYS})


def repository(data: DataSection, usual: dict[str, tuple[str, ...]]) -> DataSection:
    """One whose `source` is a repository's name, with its address and files. `usual`: names that splits have. Errors:
    `RunError`."""
    import datasets

    assert data.source is not None
    commit = _commit(data.source, data.revision, data.source)
    root = f"hf://datasets/{data.source}@{commit}"
    try:
        files = datasets.load_dataset_builder(data.source, data.config, revision=commit).config.data_files or {}
    except Exception as error:  # whatever the Hub and the network raise; a configuration to choose; code to run
        raise RunError(f"data.source: {data.source}: {explained(error, commit)}") from None
    found: dict[str, Any] = {}
    for split, names in usual.items():
        given = getattr(data, split)
        name = next((name for name in ([given] if given is not None else names) if name in files), None)
        if name is None and given is not None:
            raise RunError(f"data.{split}: {data.source} has no split {given!r}; it has {', '.join(map(str, files))}")
        if name is None:
            continue
        if other := next((str(each) for each in files[name] if not str(each).startswith(f"{root}/")), None):
            raise RunError(
                f"data.stream: {data.source} has its rows elsewhere ({other}); name the shards in data.train"
            )
        found[split] = [str(each).removeprefix(f"{root}/") for each in files[name]]
    if "train" not in found:
        raise RunError(f"data.train: {data.source} has no split called train; it has {', '.join(map(str, files))}")
    return data.model_copy(update={"source": root, "config": None, "revision": None} | found)


def _commit(repository: str, revision: str | None, what: str) -> str:
    """The commit that a branch or a tag names now. Errors: `RunError`."""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(repository, revision=revision).sha)
    except Exception as error:  # whatever the Hub, the network and the library between raise
        raise RunError(
            f"data.source: {what} is no local file or folder, and the Hub was asked: {explained(error, revision)}"
        ) from None
