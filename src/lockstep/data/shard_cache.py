"""Shards that lie elsewhere, as copies on this machine: each fetched when it is wanted, so many bytes of them at most.

In: address, size and tag of each, as its store told them. Out: open files, or a `RunError` that names the address.
A copy lies sealed in a folder of its own in the cache; of several processes that want one, one fetches it. Those that
were not used for longest make room for others.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from lockstep.config.data_sources import STORES, Address, address_of
from lockstep.config.run import RunError
from lockstep.data.cache import cache_folder, damage, discard, locked, placed
from lockstep.data.object_store import Bucket, Object, Patience, Readable, StoreError, download, require
from lockstep.data.tokens import digest
from lockstep.data.web import HubFiles, Web
from lockstep.distributed.activity import ACTIVITY

Fact = tuple[str, int, str]  # address, bytes, tag
AHEAD = 4  # shards that are fetched before they are wanted, at most
_WAITING = Patience(tries=12)  # of a job that trains: half a minute, and more of object stores
_ABOUT = "bytes"  # a file in a copy's folder: its size; the time of this file is when it was last used
_AGAIN = 5  # times that a copy is opened which others make room of meanwhile


class Unfetched(RunError):
    """A shard that cannot be had now, and may be later."""


def reader(address: Address, key: str, patience: Patience | None = None) -> Readable:
    """What reads where an address is. Errors: `RunError`, `StoreError`."""
    if address.scheme in STORES:
        require(address, key)
        return Bucket(address, patience)
    patience = patience or Patience(tries=5, silent_s=60.0)
    return HubFiles(address, patience) if address.scheme == "hf" else Web(patience)


def fetch(store: Readable, found: Object, to: Path, tell: Callable[[int], None]) -> None:
    """A file, compared with the hash that the Hub has of it. Errors: `StoreError`, `OSError`."""
    sha256 = download(store, found, to, tell)
    if found.address.scheme != "hf" or found.tag in (sha256, _git(to, found.size)):
        return
    to.unlink()
    raise StoreError(f"{found.address} does not match the hash that the Hub has of it", again=True)


def path_of(address: Address) -> str:
    """Where it is in a folder that stands for all stores."""
    return "/".join(filter(None, (address.scheme, address.place, address.path)))


def named(text: str) -> str:
    """A message with addresses instead of the paths of copies."""
    return re.sub(re.escape(str(_all())) + r"/[0-9a-f]+/(s3|gs|az|https|http|hf)/", r"\1://", text)


def unpinned(address: str) -> str:
    """An address without a revision of the Hub's: what a file holds is told by its tag."""
    return re.sub(r"^(hf://datasets/[^/]+/[^/@]+)@[^/]+", r"\1", address)


class ShardCache:
    """The shards of a stream."""

    def __init__(self, facts: Iterable[Fact], gigabytes: float, among: int = 1) -> None:
        """`gigabytes`: what copies may take in the cache, those of other runs among them. `among`: sources that are
        read at once, each of which has its share of that. Asks nothing yet."""
        self.facts, self.among = [*facts], among
        self._most, self._own = gigabytes * 1e9, os.getpid()
        self._objects: dict[Path, Object] = {}
        for address, size, tag in self.facts:
            plain = unpinned(address)
            path = _all() / digest(plain, size, tag) / path_of(address_of(plain))
            self._objects[path] = Object(address_of(address), size, tag)
        self.paths = list(self._objects)
        self._readers: dict[str, Readable] = {}
        self._lock = threading.Lock()  # of what follows
        self._next: list[Path] = []
        self._done: set[Path] = set()  # of what came ahead, fetched or not
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Errors: `RunError` where two of the shards do not fit, the one that is read and the next."""
        largest = max(self._objects.values(), key=lambda each: each.size)
        if 2 * largest.size * self.among > self._most:
            of = f" of each of {self.among} sources" if self.among > 1 else ""
            raise RunError(
                f"data.stream_cache_gb: {self._most / 1e9:g} GB have no room for two shards{of}, of which the largest, "
                f"{largest.address}, has {largest.size / 1e9:.3g} GB; give more, or make more and smaller shards"
            )

    @property
    def room(self) -> int:
        """How many shards fit at a time, whichever they are."""
        return int(self._most // max(1, *(each.size for each in self._objects.values())))

    def opened(self, path: Path) -> BinaryIO:
        """A copy, fetched unless it is there. Errors: `RunError`; `Unfetched` for what may go by."""
        for _ in range(_AGAIN):
            self.fetch(path)
            with suppress(FileNotFoundError):  # another process has made room
                return open(path, "rb")
        raise Unfetched(f"data.train: {self._objects[path].address}: its copy is removed whenever it is there: {_MORE}")

    def fetch(self, path: Path) -> None:
        """Have a copy. Errors: as those of `opened`."""
        found, folder = self._objects[path], _folder(path)
        try:
            with locked(folder.name):
                self._make_room(folder, found.size)
                if damage(path) is None:
                    return
                if os.getpid() != self._own:  # the libraries that ask stores do not survive a fork
                    raise Unfetched(f"data.train: {found.address}: another run has removed its copy: {_MORE}")
                discard(path)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                store = self._reader(found.address)
                placed(
                    path, lambda aside: fetch(store, found, aside, _heard(folder)), path.with_name(f"{path.name}.part")
                )
        except StoreError as error:
            kind = Unfetched if error.again else RunError
            raise kind(f"data.train: {error}") from error

    def done_with(self, path: Path) -> None:
        """Of all copies this one makes room first, until it is wanted again; not one that was fetched earlier and waits
        to be read."""
        with suppress(FileNotFoundError):
            os.utime(_folder(path) / _ABOUT, (0, 0))

    def coming(self, paths: Sequence[Path]) -> None:
        """Fetch these beside, in this order, as far as half of the room goes; one at least. What cannot be fetched is
        told when it is wanted."""
        some: list[Path] = []
        size = 0
        for path in paths:
            size += self._objects[path].size
            if some and size > self._most / self.among / 2:
                break
            some.append(path)
        with self._lock:
            self._done &= set(some)
            self._next = [path for path in some if path not in self._done]
            if self._next and self._thread is None:
                self._thread = threading.Thread(target=self._fetch_ahead, name="lockstep-shards", daemon=True)
                self._thread.start()

    def _fetch_ahead(self) -> None:
        while True:
            with self._lock:
                if not self._next:
                    self._thread = None
                    return
                path = self._next.pop(0)
                self._done.add(path)
            with suppress(Exception):  # also of a process that ends
                self.fetch(path)

    def _reader(self, address: Address) -> Readable:
        with self._lock:
            if address.root not in self._readers:
                self._readers[address.root] = reader(
                    address, "data.train", None if address.scheme in STORES else _WAITING
                )
            return self._readers[address.root]

    def _make_room(self, folder: Path, size: int) -> None:
        """Note that a copy is wanted, and remove others where there would be too much."""
        about = folder / _ABOUT
        with suppress(FileNotFoundError):
            os.utime(about)
            return
        with locked("shards"):
            for left in _all().glob("*.gone"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            held = sorted(
                (file.stat().st_mtime_ns, int(file.read_text()), file.parent) for file in _all().glob(f"*/{_ABOUT}")
            )
            total = size + sum(each for _, each, _ in held)
            for _, each, other in held:
                if total <= self._most:
                    break
                gone = other.with_name(f"{other.name}.{os.getpid()}.gone")
                os.rename(other, gone)  # whoever has it open reads on
                shutil.rmtree(gone, ignore_errors=True)
                total -= each
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about.write_text(str(size), encoding="utf-8")


_MORE = "give data.stream_cache_gb more, or LOCKSTEP_CACHE another folder; what is done is kept"


def _all() -> Path:
    return cache_folder() / "shards"


def _folder(path: Path) -> Path:
    """Of a copy and what is known about it."""
    return _all() / path.relative_to(_all()).parts[0]


def _heard(folder: Path) -> Callable[[int], None]:
    def tell(count: int) -> None:
        ACTIVITY.moves += 1  # a slow link is no process that hangs
        with suppress(FileNotFoundError):
            os.utime(folder / _ABOUT)

    return tell


def _git(file: Path, size: int) -> str:
    """Git's name for what a file holds, which the Hub has of small ones."""
    seen = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with open(file, "rb") as opened:
        while block := opened.read(2**20):
            seen.update(block)
    return seen.hexdigest()
