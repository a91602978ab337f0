"""The hashes of an export when it was written, and whether it still has them: `OUTPUT/export.json`.

In: the export's folder. Out: files that are on the disk, readable as the folder's others, and their hashes; later what
is wrong with one, or nothing, or a `RunError` for who would use it. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from lockstep.config.run import RunError, replace_text

FILE = "export.json"


def settle(aside: Path, output: Path) -> None:
    """Make a written folder the export of an output folder: synced, with one mode for all files, whatever wrote them,
    and its hashes beside it. The one before is there until then. Errors: `OSError`."""
    final, before, record = output / "export", output / ".export.removed", output / f".{FILE}.partial"
    try:
        record.touch()
        mode = record.stat().st_mode & 0o777  # what this process's umask leaves
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
    os.replace(record, output / FILE)  # first: an export without its hashes counts as damaged
    os.rename(aside, final)
    sync(output)
    clear(before)


def withdraw(output: Path) -> None:
    """Do not count the export of an output folder as one: without its hashes it is damaged, so the next start writes it
    again from the checkpoint, and nothing copies or pushes it meanwhile. Errors: `OSError`."""
    (output / FILE).unlink(missing_ok=True)


def damage(output: Path) -> str | None:
    """The fault of the export of an output folder, or None; reads its weights. A person may have edited its card
    and its JSON files, which must be there and be JSON."""
    export = output / "export"
    if not (export / "config.json").is_file():
        return "config.json is missing"
    try:
        hashes: dict[str, str] = json.loads((output / FILE).read_bytes())
    except FileNotFoundError:
        return f"{FILE} is missing"
    except (OSError, ValueError, RecursionError):
        return f"{FILE} cannot be read"
    for name, known in hashes.items():
        try:
            if name.endswith(".json"):
                json.loads((export / name).read_bytes())
                continue
            digest = sha256_of(export / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as caught:
            return f"{name}: {caught.strerror}"
        except (ValueError, RecursionError):
            return f"{name} is not JSON"
        if digest != known and name != "README.md":
            return f"{name} does not match its hash"
    return None


def require_whole(output: Path) -> None:
    """Refuse the export of an output folder that is not as it was written. Its files are read once: the cache keeps
    their sizes and times, and they are read again when one differs. Errors: `RunError`."""
    from lockstep.data.cache import cache_folder  # which imports pyarrow, and commands that start at once import this

    state = _state(output)
    record = cache_folder() / "exports" / hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:32]
    with suppress(OSError, UnicodeError):
        if state is not None and record.read_text(encoding="utf-8") == state:
            return
    if (fault := damage(output)) is not None:
        raise RunError(
            "LS6130",
            f"{output}/export cannot be used: {fault}. Restore what was written there; or run lockstep train again, "
            "which writes the export anew if the last checkpoint is there; or name a checkpoint "
            f"({output}/checkpoints/latest)",
        )
    if state is not None:
        with suppress(OSError):  # a cache that cannot be written: then the export is read the next time, too
            record.parent.mkdir(parents=True, exist_ok=True)
            replace_text(record, state)


def require_whole_source(source: str) -> None:
    """`require_whole` of the export that `model.source` or `tokenizer.source` names: by OUTPUT, or by OUTPUT/export.
    Anything else is no business of this. Errors: `RunError`."""
    path = Path(source).expanduser()
    output = path.parent if path.name == "export" else path
    if (output / "run.yaml").is_file() and (output / "export").is_dir() and not (output / "config.json").is_file():
        require_whole(output)


def _state(output: Path) -> str | None:
    """A hash of the names, sizes and times of an export's files, and of their record; None if it has no such files."""
    try:
        files = [output / FILE, *sorted((output / "export").rglob("*"))]
        stats = [(path.as_posix(), path.stat()) for path in files]
    except OSError:
        return None
    facts = [(name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes. Errors: `OSError`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def clear(path: Path) -> None:
    """Remove a folder that is written aside, as far as that goes; of a link the link, and nothing behind it."""
    with suppress(OSError):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file, or new names in a folder, survive a power cut. Errors: `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
