"""Files that end in .gz, .bz2, .xz or .zst: what is in them, a block at a time, and no more than is plausible.

In: a local file of any name. Out: its bytes, unpacked where its name says so, or a `RunError` that names the file and
how far it could be read.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lockstep.config.run import RunError
from lockstep.data.cache import cache_folder, locked

ENDINGS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
BLOCK = 2**20  # bytes read at a time
_SMALL = 2**16
MOST = 1000  # times its own size that a file may unpack to, if that is
LARGE = 2**30  # bytes or more


def is_compressed(file: Path) -> bool:
    """Whether its name says that it is compressed."""
    return file.suffix.lower() in ENDINGS


def plain(file: Path) -> Path:
    """What it would be called unpacked."""
    return file.with_suffix("") if is_compressed(file) else file


def ending(file: Path) -> str:
    """All of its ending: .jsonl, or .jsonl.gz."""
    return plain(file).suffix + (file.suffix if is_compressed(file) else "")


def opened(file: Path) -> Any:
    """The bytes that are in it, for reading from the beginning. Errors: those of the library that unpacks."""
    kind: Any = ENDINGS.get(file.suffix.lower())
    if kind == "zstd":
        import pyarrow as pa

        return pa.CompressedInputStream(pa.OSFile(str(file)), "zstd")
    readers: dict[str | None, Any] = {None: open, "gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
    return readers[kind](file, "rb")


def blocks(file: Path, key: str) -> Iterator[bytes]:
    """Read the unpacked bytes a block at a time. Errors: `RunError` for a file that cannot be read, that is cut off or
    damaged, and for one of which implausibly much would come."""
    total, lines = 0, 1
    try:
        size = file.stat().st_size
        with opened(file) as stream:
            # What comes before the place where a file is cut off is given out first; of zstd all is lost that is read
            # together with it.
            while block := stream.read1(_SMALL if file.suffix.lower() == ".zst" else BLOCK):
                total += len(block)
                if is_compressed(file) and total > max(LARGE, MOST * size):
                    raise RunError(
                        f"{key}: {file} has {size:,} bytes and unpacks to more than {total / 2**30:,.1f} GiB, which "
                        "looks like a mistake or a trap; unpack it if it is meant"
                    )
                yield block
                lines += block.count(b"\n")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if not is_compressed(file):
            raise RunError(f"{key}: cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
        raise RunError(
            f"{key}: cannot unpack {file} beyond line {lines:,} ({ENDINGS[file.suffix.lower()]}: "
            f"{getattr(error, 'strerror', None) or str(error) or type(error).__name__}): it is cut off or damaged, or "
            "is no such file; fetch or write it again"
        ) from None


@contextmanager
def unpacked(files: list[Path], key: str) -> Iterator[list[Path]]:
    """Unpack compressed files into the cache, for as long as they are read; plain files stay. They have the same paths
    and times whenever they are unpacked: what `datasets` keeps of a file is found by these. Errors:
    `RunError`; one that is raised meanwhile names the file as it was given."""
    if not any(map(is_compressed, files)):
        yield files
        return
    known = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    name = hashlib.sha256(repr(known).encode()).hexdigest()[:24]
    with ExitStack() as stack:
        stack.enter_context(locked(f"unpacked-{name}"))
        folder = cache_folder() / "unpacked" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        there = {
            file: folder / f"{i:05d}-{plain(file).name}" if is_compressed(file) else file
            for i, file in enumerate(files)
        }
        for file, to in there.items():
            if to is not file:
                _unpack(file, to, key)
        try:
            yield [there[file] for file in files]
        except RunError as error:
            said = str(error)
            for file, to in there.items():
                said = said.replace(str(to), str(file))
            raise RunError(said) from error


def _unpack(file: Path, to: Path, key: str) -> None:
    """Errors: `RunError`."""
    try:
        with open(to, "wb") as out:
            for block in blocks(file, key):
                out.write(block)
        os.utime(to, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    except OSError as error:
        raise RunError(
            f"{key}: cannot unpack {file} into {to.parent}: {error.strerror or error}; make room, or set "
            "LOCKSTEP_CACHE to another folder"
        ) from error
