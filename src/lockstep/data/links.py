"""Links in folders of data: those that lead out of the folder that a run names are refused, or followed if it says so.

In: the `data` section, and the files of its splits. Out: nothing, or a `RunError` that names a link and where it leads.
A folder that comes from elsewhere could otherwise have files of this machine trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lockstep.config.run import RunError
from lockstep.config.sections import DataSection


def check(data: DataSection, files: Mapping[str, list[Path]]) -> None:
    """`files`: split -> those that were looked for in folders, or named. Errors: `RunError`, where one lies outside of
    all that the section names, and `data.follow_links` is not set."""
    if data.follow_links:
        return
    named = set(_named(data))
    inside: dict[Path, Path | None] = {}  # folder -> where it really is; None: outside
    for split, some in files.items():
        out = []
        for file in some:
            if file.parent not in inside:
                real = file.parent.resolve()
                inside[file.parent] = real if _within(real, named) else None
            if (inside[file.parent] is None or file.is_symlink()) and not _within(file.resolve(), named):
                out.append(file)
        if out:
            more = f" (and {len(out) - 1:,} more like it)" if len(out) > 1 else ""
            raise RunError(
                f"data.{split}: {out[0]} leads by a link to {out[0].resolve()}{more}, out of what the run file names: "
                "with a folder that comes from elsewhere, that may be a file of yours. Where the links are meant, set "
                "data.follow_links=true"
            )


def _within(path: Path, named: set[Path]) -> bool:
    return path in named or any(parent in named for parent in path.parents)


def _named(data: DataSection) -> Iterator[Path]:
    """Where the files and folders really are that the section names, and those that its globs begin in."""
    root = Path(data.source).expanduser() if data.source is not None else None
    texts = [data.source, data.train, data.validation, data.test]
    for text in (text for each in texts if each for text in ([each] if isinstance(each, str) else each)):
        path = Path(text).expanduser()
        for place in (path, root / path if root is not None else path):
            if not place.exists():
                parts = place.parts
                end = next((i for i, part in enumerate(parts) if re.search(r"[*?\[]", part)), len(parts))
                place = Path(*parts[:end])
                if end == len(parts) or not place.is_dir():
                    continue
            real = place.resolve()
            yield real
            for folder in real.parents:
                if folder.name == "snapshots":  # the Hub's cache, whose files are links into the folder beside it
                    yield folder.parent / "blobs"
