"""Addresses of files elsewhere, as a run file has them: which scheme, which bucket, which name in it.

In: a text such as s3://bucket/folder/file.jsonl. Out: its parts, or a `ValueError` that says what is known.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

STORES = ("s3", "gs", "az")  # object stores: read, listed, written
READ_ONLY = ("https", "http", "hf")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# What others call them.
_ALSO = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "wasb": "az", "wasbs": "az"}


@dataclass(frozen=True)
class Address:
    """`scheme://place/path`. `place`: a bucket, a container, a host, or of hf datasets/USER/REPO[@REVISION]."""

    scheme: str
    place: str
    path: str  # without slashes at its ends

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}" + (f"/{self.path}" if self.path else "")

    @property
    def root(self) -> str:
        """Of all that is in the same place."""
        return f"{self.scheme}://{self.place}"

    def below(self, path: str) -> Address:
        """What lies under it by that name."""
        return Address(self.scheme, self.place, "/".join(filter(None, (self.path, path))))


def is_address(text: object) -> bool:
    """Whether a value of a run file has a scheme, known or not; a path on this machine has none."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


def address_of(text: str) -> Address:
    """The parts of one that `is_address`. Errors: `ValueError`."""
    match = _SCHEME.match(text)
    assert match is not None
    scheme, rest = match[1].lower(), text[match.end() :]
    known = (*STORES, *READ_ONLY)
    if scheme not in known:
        near = _ALSO.get(scheme) or next(iter(difflib.get_close_matches(scheme, known, 1)), None)
        hint = f"did you mean {near}://? " if near else "a file of this machine is named by its path alone; "
        raise ValueError(f"{text}: unknown scheme {scheme}://; {hint}known are {', '.join(f'{s}://' for s in known)}")
    if scheme in ("https", "http") and re.search(r"[?#]", rest):
        raise ValueError(f"{text}: an address with ? or # cannot be used; name the file itself")
    parts = [part for part in rest.split("/") if part]
    count = 3 if scheme == "hf" else 1
    if len(parts) < count or (scheme == "hf" and parts[0] != "datasets"):
        wanted = "hf://datasets/USER/REPO/path" if scheme == "hf" else f"{scheme}://BUCKET/path"
        raise ValueError(f"{text}: wanted is {wanted}")
    if ".." in parts or "." in parts:
        raise ValueError(f"{text}: . and .. mean nothing in an address")
    return Address(scheme, "/".join(parts[:count]), "/".join(parts[count:]))


def _of_mirror(text: str) -> str:
    """Errors: `ValueError`."""
    if not is_address(text):
        raise ValueError(f"{text!r} is no address; wanted is one such as s3://bucket/runs/emotion")
    address = address_of(text)
    if address.scheme not in STORES:
        raise ValueError(
            f"{address.scheme}:// can be read from and not written to; known are "
            f"{', '.join(f'{s}://' for s in STORES)} (hub.push_to uploads the export to the Hub)"
        )
    if not address.path:
        raise ValueError(f"{text} is a whole bucket: give a folder of this run in it, such as {address}/runs/emotion")
    return str(address)


Mirror = Annotated[str, AfterValidator(_of_mirror)]


def _path(text: str) -> str:
    """Errors: `ValueError` for what cannot be a path, nor the name of something on the Hub."""
    try:
        content = text.encode()
    except UnicodeError:
        raise ValueError(f"{text[:60]!r} is not UTF-8") from None
    if b"\0" in content:
        raise ValueError(f"{text[:60]!r} holds a zero character, as no path does")
    if "://" not in text and (len(content) > 4000 or any(len(part) > 255 for part in content.split(b"/"))):
        raise ValueError(f"{text[:40]!r}... has {len(text):,} characters; no path or name is that long")
    return text


PathText = Annotated[str, AfterValidator(_path)]
