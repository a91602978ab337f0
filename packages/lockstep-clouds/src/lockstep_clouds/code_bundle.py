"""Bundle a run's local files for machines without access to them.

In: a run. Out: files with their remote names, the run with remote paths, and an archive of lockstep with the user's own
modules. Imports no torch.
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
from lockstep.config import plugins, user_code
from lockstep.config.run import Run, RunError
from lockstep.config.sections import DataSection, LaunchSection
from lockstep.data import file_formats, row_files
from lockstep.data.source import BUILTIN, local_splits, names_data, sections

DISTRIBUTION = "lockstep-train"


@dataclass(frozen=True)
class Parcel:
    """A run packed for other machines."""

    run: Run  # with remote paths
    data: Mapping[str, Path]  # name below the remote data folder -> local file: examples, a local model, a tokenizer
    modules: Mapping[str, Path]  # name below the remote code folder -> local file


def packed(run: Run, output: str, data: str) -> Parcel:
    """Pack a run. `output` and `data`: remote folders. Errors: `RunError` for missing local files."""
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
    """Map the local files of one source to their names below the remote folder `data`/`below`, and return the keys with
    remote paths. Empty for data on the Hub or built-in data. Errors: `RunError`."""
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
    return files, keys | ({"source": None} if keys and section.source != BUILTIN else {})


def _row_names(local_files: list[Path], split: str) -> list[str]:
    """Return remote names for files of rows, with their extensions."""
    if len(local_files) == 1:
        return [split + file_formats.ending(local_files[0])]
    return [f"{split}-{i:03d}{file_formats.ending(file)}" for i, file in enumerate(local_files)]


def _side_names(local_files: list[Path], split: str) -> list[str]:
    """Return remote names for parallel files: files of one stem (`NAME.en`, `NAME.de`) share a new stem and keep their
    language suffixes."""
    stems = list(dict.fromkeys(file.parent / row_files.named(file)[0] for file in local_files))
    names = []
    for file in local_files:
        stem, side = row_files.named(file)
        packing = file.suffix if file_formats.is_compressed(file) else ""
        names.append(f"{split}-{stems.index(file.parent / stem):03d}.{side}{packing}")
    return names


def _class_names(local_files: list[Path], split: str) -> tuple[list[str], list[str]]:
    """Return (remote names of files, remote folders as patterns) for label folders. Folder names are labels, so they
    and their order stay; several folders may have the same label."""
    folders = list(dict.fromkeys(file.parent for file in local_files))
    places = {folder: f"{split}/{i:03d}/{folder.name}" for i, folder in enumerate(folders)}
    return [f"{places[file.parent]}/{file.name}" for file in local_files], [
        glob.escape(name) for name in places.values()
    ]


def inside(launch: LaunchSection, machines: int, meet: str) -> LaunchSection:
    """Return the `launch` section for inside a container: `local` for one machine, else `torchrun` with the rendezvous
    address `meet` (host:port). The container's command line adds `launch.node_rank`."""
    own: dict[str, Any] = {name: getattr(launch, name) for name in type(launch).model_fields if name != "name"}
    if machines > 1:
        return LaunchSection(name="torchrun", **own, machines=machines, rendezvous=meet)  # type: ignore[call-arg]
    return LaunchSection(name="local", **own)


def pairs(key: str, entries: list[str], what: str = "VARIABLE=value") -> dict[str, str]:
    """Parse `NAME=text` entries. Errors: `RunError`."""
    mapping = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*", name) or not value:
            raise RunError("LS7231", f"launch.{key}: {entry!r} is not {what}")
        mapping[name] = value
    return mapping


def modules_of(run: Run) -> dict[str, Path]:
    """Map remote name -> local file for the user's own modules: those that the run file names by dotted path or entry
    point, and their imports. Includes modules beside the run file or on PYTHONPATH, but not installed packages. A
    package is included completely, and for an entry point also its distribution's metadata. Errors: `RunError` if a
    module is missing."""
    modules: dict[str, Path] = {}
    trackers = {f"track.to ({name})": plugins.path_of("track", name) for name in run.track.to}
    keys = user_code.named(run.task, run.optim, run.strategy)
    keys |= {key: name for key, name in trackers.items() if user_code.is_own(name)}
    for key, dotted in keys.items():
        files = user_code.files_of([dotted])
        module = dotted.rpartition(".")[0]
        file = module.replace(".", "/")
        if not any(name.startswith((f"{file}.", f"{file}/__init__.")) for name in files):
            raise RunError(
                "LS7232",
                f"{key}: module {module} is neither beside the run file nor on PYTHONPATH, so it cannot be bundled",
            )
        for name, path in files.items():
            if {"site-packages", "dist-packages"} & set(path.parts):
                continue  # installed in the container as a requirement
            modules[name] = path
            if name.endswith("/__init__.py") and name.count("/") == 1:
                modules |= {f"{path.parent.name}/{f.relative_to(path.parent)}": f for f in _sources(path.parent)}
    for entry in _entry_points(run):
        if not _installed(entry):
            metadata = [file for file in entry.dist.files or () if file.name in ("METADATA", "entry_points.txt")]
            modules |= {f"{file.parent.name}/{file.name}": Path(str(entry.dist.locate_file(file))) for file in metadata}
    return modules


def distributions_of(run: Run) -> list[str]:
    """Requirements for installed distributions whose plug-ins the run file names and which are not bundled."""
    return sorted({f"{entry.dist.name}=={entry.dist.version}" for entry in _entry_points(run) if _installed(entry)})


def _entry_points(run: Run) -> list[Any]:
    """Entry points of the run file's task, strategy, optimizer and trackers, which a rank looks up."""
    names = [("tasks", run.task.name), ("strategies", run.strategy.name), ("optimizers", run.optim.name)]
    names += [("track", name) for name in run.track.to]
    entries = (entry for kind, name in names for entry in plugins.entries(kind).get(name, []))
    return [entry for entry in entries if entry.dist is not None]


def _installed(entry: Any) -> bool:
    file = plugins.file_of(entry.module)
    return file is not None and bool({"site-packages", "dist-packages"} & set(file.parts))


def requirements(extra: list[str]) -> str:
    """lockstep's requirements, one per line, from its installed metadata, and the user's. Libraries that affect
    results bit for bit are pinned to the versions installed here."""
    try:
        needed = [r for r in importlib.metadata.requires(DISTRIBUTION) or [] if "extra ==" not in r]
        needed = [r for r in needed if not r.startswith("lockstep-trace")]  # `archive` contains them
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
    """Create a gzipped tar of lockstep, what it needs of its own distributions, this package, `modules` and `texts`;
    equal content gives equal bytes."""
    import lockstep_trace_report  # and jinja2, which nothing else here needs

    ours = (lockstep, lockstep_trace, lockstep_trace_report)
    packages = [Path(str(module.__file__)).parent for module in ours] + [Path(__file__).parent]
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
