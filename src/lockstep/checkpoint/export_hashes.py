"""Record the hashes of an export in `OUTPUT/export.json` and check that it is unchanged.

In: the export's folder. Out: synced files with uniform permissions, and their hashes; later a description of damage, or
a `RunError` for a caller that would use a damaged export. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from lockstep.config.errors import reason_of
from lockstep.config.output_files import clear, replace_text, sync
from lockstep.config.run import RunError

FILE = "export.json"
_MAPPINGS = ("config.json", "tokenizer.json")  # a model without the keys of these cannot be loaded


def settle(aside: Path, output: Path) -> None:
    """Turn a written folder into the export of an output folder: synced, with one mode for all files, and hashes
    recorded beside it. The previous export stays until then. Errors: `OSError`."""
    final, before, record = output / "export", output / ".export.removed", output / f".{FILE}.partial"
    try:
        record.touch()
        mode = record.stat().st_mode & 0o777  # as this process's umask allows
        hashes = {}
        for path in sorted(aside.rglob("*")):
            if path.is_file():
                path.chmod(mode)
                hashes[path.relative_to(aside).as_posix()] = sha256_of(path)
            sync(path)
        sync(aside)
        record.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
        sync(record)
    except OSError:
        record.unlink(missing_ok=True)
        raise
    clear(before)
    with suppress(FileNotFoundError):
        os.rename(final, before)
    os.replace(record, output / FILE)  # first: an export that does not match its hashes counts as damaged
    os.rename(aside, final)
    sync(output)
    clear(before)


def withdraw(output: Path) -> None:
    """Mark the export of an output folder as damaged by removing its hashes: the next start writes it again from the
    checkpoint, and it is not copied or pushed. Errors: `OSError`."""
    (output / FILE).unlink(missing_ok=True)


def damage(output: Path) -> str | None:
    """Describe damage to the export of an output folder, or return None. Reads the weights. The user may edit the card
    and the JSON files except the index of sharded weights, but they must exist, be valid JSON, and config and tokenizer
    must have keys."""
    export = output / "export"
    if not export.is_dir():
        return "there is no such folder"
    if not (export / "config.json").is_file():
        return "config.json is missing"
    try:
        hashes = _recorded(output)
    except FileNotFoundError:
        return f"{FILE} is missing"
    except (OSError, ValueError, RecursionError):
        return f"{FILE} cannot be read"
    for name, known in hashes.items():
        try:
            if _editable(name):
                values = json.loads((export / name).read_bytes())
                if name in _MAPPINGS and not (isinstance(values, dict) and values):
                    return f"{name} holds no keys"
                continue
            digest = sha256_of(export / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as caught:
            return f"{name}: {reason_of(caught)}"
        except (ValueError, RecursionError):
            return f"{name} is not JSON"
        if digest != known and name != "README.md":
            return f"{name} does not match its hash"
    return None


def missing(output: Path) -> str | None:
    """Name a file that the export of an output folder lacks: its config, or one of those recorded. Reads no weights."""
    names = ["config.json"]
    with suppress(OSError, ValueError, RecursionError):
        names += _recorded(output)
    return next((name for name in names if not (output / "export" / name).is_file()), None)


def _recorded(output: Path) -> dict[str, str]:
    """Hashes of the files of an export, by name. Errors: `OSError`; `ValueError` if the file holds something else."""
    hashes = json.loads((output / FILE).read_bytes())
    if not isinstance(hashes, dict) or not hashes or not all(isinstance(each, str) for each in hashes.values()):
        raise ValueError(f"{FILE} holds no hashes")
    return hashes


def _editable(name: str) -> bool:
    """Whether a file of an export is JSON that the user may edit. The index says which files hold the weights."""
    return name.endswith(".json") and not name.endswith(".index.json")


def note_of_edits(output: Path) -> str | None:
    """Name the JSON files of a whole export that differ from what the run wrote, and the files that it did not write,
    or return None. The user may edit and add them, but the loaders of transformers read labels, tokens, sizes and
    scales, or an adapter, from them."""
    export, hashes = output / "export", _recorded(output)
    edited = [name for name, known in hashes.items() if _editable(name) and sha256_of(export / name) != known]
    files = [path.relative_to(export) for path in sorted(export.rglob("*")) if path.is_file()]
    added = [path.as_posix() for path in files if path.as_posix() not in hashes and not path.parts[0].startswith(".")]
    notes = [f"changed since the run wrote them: {', '.join(edited)}"] if edited else []
    notes += [f"not written by the run: {', '.join(added)}"] if added else []
    if not notes:
        return None
    return f"{'; '.join(notes)} in {export}; labels, tokens or predictions may differ from the run's"


def require_whole(output: Path) -> None:
    """Refuse a damaged export. Its files are read once: the cache keeps their sizes and times, and they are read again
    only if one changes. Errors: `RunError`."""
    from lockstep.data.cache import cache_folder  # imports pyarrow: too slow for commands that import this module

    state = _state(output)
    record = cache_folder() / "exports" / hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:32]
    with suppress(OSError, UnicodeError):
        if state is not None and record.read_text(encoding="utf-8") == state:
            return
    if (fault := damage(output)) is not None:
        raise RunError(
            "LS6130",
            f"{output}/export cannot be used: {fault}. Restore its files; or run lockstep train again, "
            "which rewrites the export if the last checkpoint exists; or name a checkpoint "
            f"({output}/checkpoints/latest)",
        )
    if state is not None:
        with suppress(OSError):  # cache not writable: the export is read again next time
            record.parent.mkdir(parents=True, exist_ok=True)
            replace_text(record, state)


def require_whole_source(source: str) -> None:
    """Check the export that `model.source` or `tokenizer.source` names (OUTPUT or OUTPUT/export) by `require_whole`.
    Ignores other sources. Errors: `RunError`."""
    if (output := output_of_source(source)) is not None:
        require_whole(output)


def output_of_source(source: str) -> Path | None:
    """Output folder whose export `model.source` or `tokenizer.source` names, as OUTPUT or OUTPUT/export; None for
    another source."""
    path = Path(source).expanduser()
    output = path.parent if path.name == "export" else path
    if (output / "run.yaml").is_file() and (output / "export").is_dir() and not (output / "config.json").is_file():
        return output
    return None


def _state(output: Path) -> str | None:
    """Hash of the names, sizes and times of an export's files and their record; None if a file is missing."""
    try:
        files = [output / FILE, *sorted((output / "export").rglob("*"))]
        stats = [(path.as_posix(), path.stat()) for path in files]
    except OSError:
        return None
    facts = [(name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file. Errors: `OSError`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
