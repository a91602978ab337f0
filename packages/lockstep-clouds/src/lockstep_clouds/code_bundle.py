"""What of a run lies on this machine and has to travel to machines that do not see its files.

In: a run. Out: files with the names they get there, the run with its paths as they are there, and an archive of
lockstep itself with the user's own modules. Nothing here imports torch.
"""

from __future__ import annotations

import glob
import gzip
import importlib.metadata
import io
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lockstep
import lockstep_trace
from lockstep.config import entry_points, plugins, user_code
from lockstep.config.run import Run, RunError
from lockstep.config.sections import DataSection, LaunchSection
from lockstep.data import file_formats, row_files
from lockstep.data.source import local_splits, names_data, sections

DISTRIBUTION = "lockstep-train"


@dataclass(frozen=True)
class Parcel:
    """A run made ready to travel."""

    run: Run  # as it is there
    data: Mapping[str, Path]  # name below the data folder there -> file here: examples, a local model, a tokenizer
    modules: Mapping[str, Path]  # name below the code folder there -> file here


def packed(run: Run, output: str, data: str) -> Parcel:
    """`output` and `data` are the folders there. Errors: `RunError` for local files that are not there."""
    files: dict[str, Path] = {}
    changes: dict[str, Any] = {"output": output}
    if run.data.sources is not None:
        entries = []
        for entry, section in zip(run.data.sources, sections(run.data), strict=True):
            sent, there = _data_there(section, data, f"sources/{entry.name}/")
            files |= sent
            entries.append(entry.model_copy(update=there))
        changes["data"] = run.data.model_copy(update={"sources": entries})
    elif names_data(run.data):
        sent, there = _data_there(run.data, data)
        files |= sent
        changes["data"] = run.data.model_copy(update=there)
    for part in ("model", "tokenizer"):
        section = getattr(run, part)
        if section.source is not None and (root := Path(section.source).expanduser()).is_dir():
            files |= {f"{part}/{f.relative_to(root)}": f for f in sorted(root.rglob("*")) if f.is_file()}
            changes[part] = section.model_copy(update={"source": f"{data}/{part}"})
    return Parcel(run.model_copy(update=changes), files, modules_of(run))


def _data_there(section: DataSection, data: str, below: str = "") -> tuple[dict[str, Path], dict[str, Any]]:
    """The local files of one source by the names that they get `below` the folder `data` there, and the keys that name
    them there. Nothing of what is on the Hub, or built in. Errors: `RunError`."""
    files: dict[str, Path] = {}
    keys: dict[str, Any] = {}
    for split, local_files in (local_splits(section) or {}).items():
        if section.layout == "class_folders":
            names, paths = _class_names(local_files, split)
        else:
            names = _side_names(local_files, split) if section.layout == "parallel" else _row_names(local_files, split)
            paths = names
        files |= {f"{below}{name}": file for name, file in zip(names, local_files, strict=True)}
        keys[split] = [f"{data}/{below}{name}" for name in paths] or None
    return files, keys | ({"source": None} if keys else {})


def _row_names(local_files: list[Path], split: str) -> list[str]:
    """Each file keeps its ending."""
    if len(local_files) == 1:
        return [split + file_formats.ending(local_files[0])]
    return [f"{split}-{i:03d}{file_formats.ending(file)}" for i, file in enumerate(local_files)]


def _side_names(local_files: list[Path], split: str) -> list[str]:
    """Files that are read beside each other keep what they share of their names, and their sides."""
    stems = list(dict.fromkeys(file.parent / row_files.named(file)[0] for file in local_files))
    names = []
    for file in local_files:
        stem, side = row_files.named(file)
        packing = file.suffix if file_formats.is_compressed(file) else ""
        names.append(f"{split}-{stems.index(file.parent / stem):03d}.{side}{packing}")
    return names


def _class_names(local_files: list[Path], split: str) -> tuple[list[str], list[str]]:
    """Files keep their names and their folders, which are labels; and the folders, in order. Those of one label may
    have come from several folders."""
    folders = list(dict.fromkeys(file.parent for file in local_files))
    places = {folder: f"{split}/{i:03d}/{folder.name}" for i, folder in enumerate(folders)}
    return [f"{places[file.parent]}/{file.name}" for file in local_files], [
        glob.escape(name) for name in places.values()
    ]


def inside(run: Run, machines: int, meet: str) -> LaunchSection:
    """How a container starts its ranks: `local`, or `torchrun` where several machines meet at `meet`, host:port. Each
    is told its `launch.node_rank` on its command line."""
    own: dict[str, Any] = {name: getattr(run.launch, name) for name in type(run.launch).model_fields if name != "name"}
    if machines > 1:
        return LaunchSection(name="torchrun", **own, machines=machines, rendezvous=meet)  # type: ignore[call-arg]
    return LaunchSection(name="local", **own)


def pairs(key: str, entries: list[str], what: str = "VARIABLE=value") -> dict[str, str]:
    """`NAME=text` entries as a mapping. Errors: `RunError`."""
    mapping = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*", name) or not value:
            raise RunError("LS7231", f"launch.{key}: {entry!r} is not {what}")
        mapping[name] = value
    return mapping


def modules_of(run: Run) -> dict[str, Path]:
    """The files of modules that the run file names by a dotted path or an entry point and that lie beside it or on
    PYTHONPATH, not among installed packages, and of all modules of that kind that they import: they are found there
    under the same name. Of a package everything, of an entry point its distribution's metadata. Errors: `RunError`
    where there is no such module."""
    modules: dict[str, Path] = {}
    trackers = {f"track.to ({name})": plugins.path_of("track", name) for name in run.track.to}
    keys = user_code.named(run) | {key: name for key, name in trackers.items() if user_code.is_own(name)}
    for key, dotted in keys.items():
        files = user_code.files_of([dotted])
        module = dotted.rpartition(".")[0]
        file = module.replace(".", "/")
        if not any(name.startswith((f"{file}.", f"{file}/__init__.")) for name in files):
            raise RunError(
                "LS7232",
                f"{key}: module {module} is neither beside the run file nor on PYTHONPATH, so it cannot be sent along",
            )
        for name, path in files.items():
            if {"site-packages", "dist-packages"} & set(path.parts):
                continue  # a requirement, to be installed there
            modules[name] = path
            if name.endswith("/__init__.py") and name.count("/") == 1:
                modules |= {f"{path.parent.name}/{f.relative_to(path.parent)}": f for f in _sources(path.parent)}
    for entry in _entry_points(run):
        if not _installed(entry):
            metadata = [file for file in entry.dist.files or () if file.name in ("METADATA", "entry_points.txt")]
            modules |= {f"{file.parent.name}/{file.name}": Path(str(entry.dist.locate_file(file))) for file in metadata}
    return modules


def distributions_of(run: Run) -> list[str]:
    """The distributions that are installed here and whose plug-ins the run file names, as requirements: what is not
    sent along."""
    return sorted({f"{entry.dist.name}=={entry.dist.version}" for entry in _entry_points(run) if _installed(entry)})


def _entry_points(run: Run) -> list[Any]:
    """Those behind the names of a run file: of its task, strategy, optimizer and trackers, which a rank looks for."""
    names = [("tasks", run.task.name), ("strategies", run.strategy.name), ("optimizers", run.optim.name)]
    names += [("track", name) for name in run.track.to]
    entries = (entry for kind, name in names for entry in entry_points.named(kind).get(name, []))
    return [entry for entry in entries if entry.dist is not None]


def _installed(entry: Any) -> bool:
    file = entry_points.file_of(entry.module)
    return file is not None and bool({"site-packages", "dist-packages"} & set(file.parts))


def requirements(extra: list[str]) -> str:
    """What lockstep needs, a requirement a line, as its own installation says, and what the user adds. The library
    versions that decide bits are pinned to those here, where they are installed here."""
    try:
        needed = [r for r in importlib.metadata.requires(DISTRIBUTION) or [] if "extra ==" not in r]
        needed = [r for r in needed if not r.startswith("lockstep-trace")]  # `archive` holds it
    except importlib.metadata.PackageNotFoundError:
        raise RunError(
            "LS7233",
            f"{DISTRIBUTION} is not installed as a package on this machine, so its dependencies are unknown; "
            "install it with pip",
        ) from None
    lines = []
    for line in sorted(needed):
        name = re.match(r"[\w.-]+", line)
        assert name is not None
        if name[0] == "transformers":
            with suppress(importlib.metadata.PackageNotFoundError):
                line = f"transformers=={importlib.metadata.version('transformers')}"
        lines.append(line)
    return "\n".join([*lines, *extra]) + "\n"


def archive(texts: Mapping[str, str], modules: Mapping[str, Path]) -> bytes:
    """A gzipped tar of lockstep, lockstep_trace, this package, `modules` and `texts`; the same content gives the same
    bytes."""
    packages = [Path(str(module.__file__)).parent for module in (lockstep, lockstep_trace)] + [Path(__file__).parent]
    files = {f"{each.name}/{f.relative_to(each)}": f for each in packages for f in _sources(each)} | dict(modules)
    contents = {name: file.read_bytes() for name, file in files.items()} | {k: v.encode() for k, v in texts.items()}
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name, content in sorted(contents.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(plain.getvalue(), mtime=0)


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path
