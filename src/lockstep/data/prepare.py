"""Prepare a run's data before any process group exists: once per machine, cached under a key of all inputs.

In: a run. Out: a `Prepared`. With a cached one, a worker needs neither the raw data nor the library that reads it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lockstep._version import __version__
from lockstep.config import plugins, user_code
from lockstep.config.lazy import lazy
from lockstep.config.run import Run, RunError
from lockstep.config.sections import DataSection
from lockstep.data import raw_rows, source
from lockstep.data.arrow_cache import VERSION, Prepared, content, digest
from lockstep.data.cache import ROWS, cache_folder, discard, inside, locked, made_by, seal, sealed
from lockstep.data.tokenizer import TARGET
from lockstep.track.busy import ACTIVITY

if TYPE_CHECKING:
    from lockstep.data import file_formats, hub, remote, row_files
else:
    file_formats, hub, remote, row_files = lazy("lockstep.data", "file_formats", "hub", "remote", "row_files")

_TEMPLATES = "additional_chat_templates"  # subfolder of a tokenizer's folder
_WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".ot", ".pt", ".pth", ".onnx", ".gguf", ".ckpt", ".lock")


class Prepares(raw_rows.Makes, Protocol):
    """The parts of a task's interface that concern its data."""

    def __init__(self, run: Run) -> None: ...

    def prepare(self) -> Prepared:
        """Prepare the tokens and labels of every split."""

    def fingerprint(self) -> str:
        """Hash of the data, as far as neither the run file nor code determines them."""


def prepare(run: Run, kind: type[Prepares], fresh: bool = False, tell: Callable[[str], None] | None = None) -> Prepared:
    """Return `kind(run).prepare()`, from the cache if none of its inputs has changed.

    `fresh`: query the Hub again for data that is not local; only the launching process does. `tell`: callback for the
    origin of the tokens. Errors: `RunError`. Every process of a machine may call it at once: one works, the others
    wait.
    """
    run = run.model_copy(update={"data": source.pinned(run.data)})
    task, elsewhere = kind(run), source.remote_facts(run.data)
    code = _code_of(user_code.named(run.task, run.optim, run.strategy), kind)
    sections = (run.task, run.data, run.model, run.tokenizer)  # their keys, except one that does not affect the data
    key = digest(
        VERSION,
        __version__,
        code,
        run.seed,
        *(part.model_dump(mode="json", exclude={"follow_links"}) for part in sections),
        _files(run.data, {"model.source": run.model.source, "tokenizer.source": run.tokenizer.source}),
        task.fingerprint(),
        *elsewhere,
        raw_rows.VERSION,
        ROWS,
    )
    path = cache_folder() / "prepared" / f"{key}.json"
    ACTIVITY.set("waiting for another process that prepares the same data")
    with locked(key):
        ACTIVITY.set("looking for the data in the cache")
        local = source.is_local(run.data)
        began, prepared, damaged = time.monotonic(), Prepared.read(path) if local or not fresh else None, {}
        if prepared is not None and (damaged := prepared.damages()):
            for place in filter(inside, damaged):
                discard(place)
            prepared = None
        if tell is not None and prepared is not None:
            tell(f"from the cache in {cache_folder()}")
        if prepared is None:
            ACTIVITY.set("reading the data")
            try:
                with made_by(digest(code)), remote.as_found(elsewhere):
                    prepared = task.prepare()
            except RunError as error:
                raise RunError(error.code, remote.with_addresses(error.message)) from error
            # a user task's own key may depend on its code or paths
            if user_code.is_own(plugins.path_of("tasks", run.task.name)):
                prepared = replace(prepared, key=_content_of(prepared))
            if (sources := prepared.facts.get("sources")) is not None:  # shard boundaries affect the order
                prepared = replace(prepared, key=digest(prepared.key, sources["rows"]["train"]))
            prepared = raw_rows.with_examples(prepared, task)
            for place in prepared.places:
                if inside(place) and not sealed(place):  # written by a user task
                    seal(place)
            prepared.write(path)
            if tell is not None:
                why = f", again because the cache is damaged: {next(iter(damaged.values()))}" if damaged else ""
                tell(f"prepared in {time.monotonic() - began:.1f} s{why}; cached in {cache_folder()}")
    return prepared


def _code_of(names: Mapping[str, str], task: type[Prepares]) -> dict[str, str]:
    """Hashes of the code that prepares the data (the task and user modules it imports), and versions of the tokenizing
    libraries."""
    code_hashes = user_code.hashes_of(name for key, name in names.items() if key.startswith("task."))
    file = sys.modules[task.__module__].__file__
    versions = {f"version of {package}": version(package) for package in ("tokenizers", "transformers")}
    return code_hashes | versions | ({"task": user_code.fingerprint(Path(file))} if file else {})


def _content_of(prepared: Prepared) -> str:
    """Hash of the tokens themselves, independent of location and code."""
    from datasets import Dataset, concatenate_datasets

    def rows_of(path: Path) -> Dataset:
        files = sorted(path.glob("*.arrow")) if path.is_dir() else [path]
        return concatenate_datasets([Dataset.from_file(str(file)) for file in files])

    splits = {split: rows_of(Path(path)) for split, path in prepared.splits.items()}
    return digest({split: content(rows, rows.column_names) for split, rows in splits.items()})


def _files(data: DataSection, folders: Mapping[str, str | None]) -> list[tuple[str, int, int]]:
    """Name, size and time of every local file that preparation reads, and the dialects of tables. `folders`: key of the
    run file -> the folder or the Hub's name of a model."""
    files = source.files_of(data)
    for key, name in folders.items():
        root = Path(hub.model_folder(name, key) if name is not None else "").expanduser()
        for folder in (root, root / TARGET, root / _TEMPLATES) if name is not None else ():
            if folder.is_dir():
                files += sorted(f for f in folder.iterdir() if f.is_file() and f.suffix not in _WEIGHTS)
    facts = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    if any(row_files.format_of(f) in file_formats.SEPARATORS for f in files):
        facts.append(("tables", file_formats.VERSION, 0))
    return facts


# -- messages --------------------------------------------------------------------------------------------------------


def left_out(facts: Mapping[str, Any]) -> str:
    """Describe the numbers of unused rows, as the end of a line about the data; empty if all are used."""
    why = {
        "left_out": "for a missing text or label",
        "lacking_or_unusable": "for a missing text or label, or as unusable",
        "unusable": "as unusable, by data.drop_unusable",
        "filtered": "by data.filter",
        "duplicates": "as duplicates",
        "dropped": "because they are also in validation or test",
    }
    reasons = [
        f"left out {reason}: {', '.join(f'{count:,} of {split}' for split, count in facts[key].items())}"
        for key, reason in why.items()
        if facts.get(key)
    ]
    return "".join(f"; {each}" for each in reasons)


def warnings(facts: Mapping[str, Any]) -> list[str]:
    """Warnings about the data: truncated texts, similar labels, `notes` of the task, and examples that are both trained
    and evaluated on."""
    messages = [
        f"{counts['texts']:,} of {counts['of']:,} {split} texts are longer than {counts['most']:,} tokens and "
        f"are truncated ({counts['tokens']:,} tokens are lost)"
        + f"; {counts['nothing']:,} more are not used, because truncation would leave nothing to learn"
        * (counts["nothing"] > 0)
        + (
            f". The model has positions for {counts['positions']:,} tokens"
            if "positions" in counts
            else f". A larger {counts['key']} keeps more"
        )
        for split, counts in facts.get("cut_texts", {}).items()
    ]
    messages += [
        "labels that differ only in surrounding blanks or case count as different labels: "
        + ", ".join(f"{name!r} ({count:,})" for name, count in group)
        + ". If they mean the same, spell them the same"
        for group in facts.get("alike_labels", [])
    ]
    messages += facts.get("notes", [])
    if facts.get("dropped"):
        return messages
    return messages + [
        f"{counts['examples']:,} of {counts['of']:,} {split} rows are also in train; the first is row "
        f"{counts['row']:,} of {split}, {counts.get('train_place') or 'row {train_row:,} of train'.format(**counts)}"
        f"{': ' + repr(counts['text']) if counts['text'] else ''}. Scores on them are too good; "
        "data.decontaminate=true removes them from train"
        for split, counts in facts.get("overlap", {}).items()
    ]
