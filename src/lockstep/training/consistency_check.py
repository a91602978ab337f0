"""Check on every rank, before training, that all processes of a job have the same run, data and software.

In: a job, and this process's device, threads and versions. Out: nothing, or a `RunError` that names the keys
that differ, with hosts and ranks.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep._version import __version__
from lockstep.config import error_messages as messages
from lockstep.config import user_code
from lockstep.config.errors import coded
from lockstep.config.run import RunError
from lockstep.data.job import Job
from lockstep.distributed.hardware import INSTRUCTIONS, instructions, set_by_user

if TYPE_CHECKING:
    from lockstep.distributed.world import World

# Keys that may differ between machines.
_OWN = ("name", "output", "launch")
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
# Local files: their contents are compared, not their names.
_PATHS = ("data.source", "data.train", "data.validation", "data.test", "model.source", "tokenizer.source")


def facts(job: Job) -> dict[str, str]:
    """Return the facts that must be equal on every machine: keys of the run file, versions, file contents, tokens."""
    run = job.run
    values: dict[str, Any] = run.model_dump(mode="json")
    for key in _OWN:
        del values[key]
    for entry in values["data"]["sources"] or ():  # sources of a mixture
        for key in ("source", "train", "validation", "test"):
            if _is_local({"data": entry}, f"data.{key}"):
                del entry[key]
    values_of = {key: repr(value) for key, value in messages.flat(values).items()}
    for key in _PATHS:
        values_of = {k: v for k, v in values_of.items() if not (k.split("[")[0] == key and _is_local(values, key))}
    values_of["the data"] = job.data.key[:16]
    if run.model.source is not None and (folder := Path(run.model.source).expanduser()).is_dir():
        values_of["the model's files"] = fingerprint(folder)
    arithmetic = set_by_user(run.strategy.exact == "portable")
    values_of["environment variables that affect arithmetic"] = ", ".join(arithmetic) or "none"
    own = user_code.hashes_of(user_code.named(run.task, run.optim, run.strategy).values())
    values_of |= {f"the code of {file}": seal for file, seal in own.items()}
    values_of["the code of lockstep"] = user_code.hash_of_lockstep()
    return values_of | {"version of lockstep": __version__} | versions_of(_PACKAGES)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of packages, as facts."""
    versions = {}
    for package in packages:
        try:
            versions[f"version of {package}"] = version(package)
        except PackageNotFoundError:
            versions[f"version of {package}"] = "not installed"
    return versions


def agree(job: Job, world: World, more: Mapping[str, str]) -> None:
    """Refuse to train if the ranks' facts, or the facts in `more`, differ. Collective. Errors: `RunError`, the same on
    every rank."""
    exact, mine = job.run.strategy.exact, facts(job) | dict(more)
    if world.portable:
        from lockstep.distributed import portable

        mine["results of this processor's arithmetic"] = portable.probe()
    elif exact:
        mine["launch.threads"] = str(world.threads)
        if world.device.type == "cpu":
            mine[INSTRUCTIONS] = instructions()
    if exact:
        mine["kind of device"] = f"{world.device.type} {platform.machine()}"
    seal = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    world.agreed = seal
    if len(set(world.all_gather(seal))) == 1:
        return
    everyone = world.all_gather((f"{world.host} (rank {world.rank})", mine))
    raise RunError.read(disagreement(everyone))


def disagreement(everyone: Sequence[tuple[str, dict[str, str]]]) -> str:
    """Format the differences: each key with its values and who has them; at most ten keys. Returns "" if nothing
    differs."""
    keys = sorted({key for _, mine in everyone for key in mine})
    rows = []
    for key in keys:
        holders: dict[str, list[str]] = {}
        for who, mine in everyone:
            holders.setdefault(mine.get(key, "not given"), []).append(who)
        if len(holders) > 1:
            sides = [f"{value} on {_some(names)}" for value, names in holders.items()]
            rows.append(f"  {key}: {', '.join(sides)}")
    if not rows:
        return ""
    more = f"\n  and {len(rows) - 10} more" if len(rows) > 10 else ""
    return coded(
        "LS7005",
        "the machines of this job differ:\n"
        + "\n".join(rows[:10])
        + more
        + "\nStart every machine with the same run file, data, code and package versions",
    )


def fingerprint(folder: Path) -> str:
    """Return a hash of a model's folder: names and sizes of its files, and the first and last MiB of each."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            digest.update(file.read(2**20))
            file.seek(max(0, size - 2**20))
            digest.update(file.read(2**20))
    return digest.hexdigest()[:16]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_local(values: dict[str, Any], key: str) -> bool:
    section, _, name = key.partition(".")
    value = values[section].get(name)
    paths = value if isinstance(value, list) else [value]
    return any(isinstance(path, str) and Path(path).expanduser().exists() for path in paths)
