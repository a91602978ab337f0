"""Opens files of OUTPUT for writing, never through a symbolic link.

In: a path in OUTPUT. Out: the opened file, or an `OSError` that names the link. Data of other programs may be behind a
link, such as the cache of a data versioning tool. Files that are replaced atomically need no check: the link goes.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO, Any

# Files that a run appends to; `.lock` is read again and again.
APPENDED = (
    *(f"{name}.jsonl" for name in ("metrics", "system", "samples", "fingerprints", "events", "ranks")),
    "log.txt",
    ".lock",
)


def open_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file for writing; `mode` and `options` as `open` takes them. Errors: `OSError`, also for a link."""
    return open(path, mode, opener=_opener, **options)


def links(folder: Path) -> dict[str, Path]:
    """Return the names in APPENDED that are symbolic links in `folder`, with the files they lead to."""
    return {name: Path(os.path.realpath(folder / name)) for name in APPENDED if (folder / name).is_symlink()}


def _opener(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError:
        if os.path.islink(path):
            text = f"{path} is a link to {os.path.realpath(path)}, and nothing is written through it"
            raise OSError(errno.EINVAL, text) from None
        raise
