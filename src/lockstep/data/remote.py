"""Remote data: download whole files into the cache, and fetch shards of a stream when they are needed.

In: addresses in the `data` section. Out: local paths, or a `RunError`. A shard is prefetched, kept in the cache while
there is room, and verified by its tag.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from lockstep.config.data_sources import STORES, Address, address_of
from lockstep.config.errors import InvalidValue
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data.arrow_cache import digest
from lockstep.data.cache import cache_folder, cached, damage, discard, locked, placed
from lockstep.data.hub import with_paths
from lockstep.data.object_store import Bucket, HubFiles, Object, Patience, Readable, StoreError, Web, download, require
from lockstep.track.busy import ACTIVITY

Fact = tuple[str, int, str]  # address, bytes, tag
AHEAD = 4  # maximum number of prefetched shards
_WAITING = Patience(tries=12)  # during training: half a minute, longer for object stores
_ABOUT = "bytes"  # file in a copy's folder with its size; its mtime is the last use
_AGAIN = 5  # attempts to open a copy that others evict concurrently


class Unfetched(RunError):
    """A shard is unavailable now; a later attempt may succeed."""


def reader(address: Address, key: str, patience: Patience | None = None) -> Readable:
    """The reader for an address. Errors: `RunError`, `StoreError`."""
    if address.scheme in STORES:
        require(address, key)
        return Bucket(address, patience)
    patience = patience or Patience(tries=5, silent_s=60.0)
    return HubFiles(address, patience) if address.scheme == "hf" else Web(patience)


def fetch(store: Readable, item: Object, to: Path, tell: Callable[[int], None]) -> None:
    """Download a file and, for the Hub, verify its hash. Errors: `StoreError`, `OSError`."""
    sha256 = download(store, item, to, tell)
    if item.address.scheme != "hf" or item.tag in (sha256, _git(to, item.size)):
        return
    to.unlink()
    raise StoreError(
        "LS2170",
        f"{item.address} does not match its hash on the Hub; run the command again to download it again",
        again=True,
    )


def path_of(address: Address) -> str:
    """Relative path of an address in a local folder that mirrors all stores."""
    return "/".join(filter(None, (address.scheme, address.place, address.path)))


def with_addresses(text: str, root: Path | None = None) -> str:
    """Replace local paths in a message by addresses: those of cached shards, or those below `root`."""
    before = f"{re.escape(str(_all()))}/[0-9a-f]+" if root is None else re.escape(str(root))
    return re.sub(before + r"/(s3|gs|az|https|http|hf)/", r"\1://", text)


def unpinned(address: str) -> str:
    """Strip the Hub revision from an address: a file's tag identifies its content."""
    return re.sub(r"^(hf://datasets/[^/]+/[^/@]+)@[^/]+", r"\1", address)


class ShardCache:
    """Local cache of a stream's remote shards."""

    def __init__(self, facts: Iterable[Fact], gigabytes: float, among: int = 1) -> None:
        """`gigabytes`: cache limit, shared with other runs. `among`: number of sources read concurrently, which share
        the limit. Sends no request."""
        self.facts, self.among = [*facts], among
        self._most, self._own = gigabytes * 1e9, os.getpid()
        self._objects: dict[Path, Object] = {}
        for address, size, tag in self.facts:
            plain = unpinned(address)
            path = _all() / digest(plain, size, tag) / path_of(address_of(plain))
            self._objects[path] = Object(address_of(address), size, tag)
        self.paths = list(self._objects)
        self._readers: dict[str, Readable] = {}
        self._lock = threading.Lock()  # protects the following attributes
        self._next: list[Path] = []
        self._done: set[Path] = set()  # prefetch attempts, successful or not
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Check that two shards, the current and the next, fit in the cache. Errors: `RunError`."""
        largest = max(self._objects.values(), key=lambda each: each.size)
        if 2 * largest.size * self.among > self._most:
            of = f" of each of {self.among} sources" if self.among > 1 else ""
            raise RunError(
                "LS2171",
                f"data.stream_cache_gb: {self._most / 1e9:g} GB cannot hold two shards{of}; the largest, "
                f"{largest.address}, has {largest.size / 1e9:.3g} GB; raise data.stream_cache_gb, or write more "
                "and smaller shards",
            )

    @property
    def room(self) -> int:
        """Number of shards, of any size in the stream, that fit in the cache."""
        return int(self._most // max(1, *(each.size for each in self._objects.values())))

    def opened(self, path: Path) -> BinaryIO:
        """Open a cached copy, fetching it if needed. Errors: `RunError`; `Unfetched` for transient failures."""
        for _ in range(_AGAIN):
            self.fetch(path)
            with suppress(FileNotFoundError):  # evicted by another process
                return open(path, "rb")
        raise Unfetched(
            "LS2172", f"data.train: {self._objects[path].address}: its local copy was evicted repeatedly: {_MORE}"
        )

    def fetch(self, path: Path) -> None:
        """Ensure that a copy is cached. Errors: as in `opened`."""
        item, folder = self._objects[path], _folder(path)
        try:
            with locked(folder.name):
                self._make_room(folder, item.size)
                if damage(path) is None:
                    return
                if os.getpid() != self._own:  # store libraries do not survive a fork
                    raise Unfetched(
                        "LS2173", f"data.train: {item.address}: another run removed its local copy: {_MORE}"
                    )
                discard(path)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                store = self._reader(item.address)
                placed(
                    path, lambda aside: fetch(store, item, aside, _heard(folder)), path.with_name(f"{path.name}.part")
                )
        except StoreError as error:
            kind = Unfetched if error.again else RunError
            raise kind(error.code, f"data.train: {error.message}") from error

    def done_with(self, path: Path) -> None:
        """Mark a copy as the first to evict until it is needed again, before copies that were prefetched earlier and
        are still unread."""
        with suppress(FileNotFoundError):
            os.utime(_folder(path) / _ABOUT, (0, 0))

    def coming(self, paths: Sequence[Path]) -> None:
        """Prefetch these files in the background, in order, up to half of the cache limit but at least one. Errors are
        raised when the file is read."""
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
            with suppress(Exception):  # including errors at process exit
                self.fetch(path)

    def _reader(self, address: Address) -> Readable:
        with self._lock:
            if address.root not in self._readers:
                self._readers[address.root] = reader(
                    address, "data.train", None if address.scheme in STORES else _WAITING
                )
            return self._readers[address.root]

    def _make_room(self, folder: Path, size: int) -> None:
        """Record a copy as in use, and evict others if the limit would be exceeded."""
        about = folder / _ABOUT
        with suppress(FileNotFoundError):
            os.utime(about)
            return
        with locked("shards"):
            for remains in _all().glob("*.gone"):  # left by a killed process
                shutil.rmtree(remains, ignore_errors=True)
            cached_shards = sorted(
                (file.stat().st_mtime_ns, int(file.read_text()), file.parent) for file in _all().glob(f"*/{_ABOUT}")
            )
            total = size + sum(each for _, each, _ in cached_shards)
            for _, each, other in cached_shards:
                if total <= self._most:
                    break
                gone = other.with_name(f"{other.name}.{os.getpid()}.gone")
                os.rename(other, gone)  # open files stay readable
                shutil.rmtree(gone, ignore_errors=True)
                total -= each
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about.write_text(str(size), encoding="utf-8")


_MORE = "raise data.stream_cache_gb, or set LOCKSTEP_CACHE to another folder; finished work is kept"


def _all() -> Path:
    return cache_folder() / "shards"


def _folder(path: Path) -> Path:
    """Folder of a cached copy and its metadata."""
    return _all() / path.relative_to(_all()).parts[0]


def _heard(folder: Path) -> Callable[[int], None]:
    def tell(count: int) -> None:
        ACTIVITY.moves += 1  # a slow download is not a hang
        with suppress(FileNotFoundError):
            os.utime(folder / _ABOUT)

    return tell


def _git(file: Path, size: int) -> str:
    """Git blob hash of a file, which the Hub reports for small files."""
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with open(file, "rb") as opened:
        while block := opened.read(2**20):
            digest.update(block)
    return digest.hexdigest()


MOST = 200_000  # maximum number of names in a folder
AT_ONCE = 8  # concurrent downloads
Splits = Callable[[DataSection], dict[str, list[Path]] | None]


@dataclass(frozen=True)
class _RemoteFiles:
    """Files that a section reads, keyed by their path in the local mirror."""

    objects: dict[str, tuple[Object, Readable]]
    paths: dict[str, str]  # address in the run file -> path in that folder
    shards: list[str]  # remote train files of a stream, in order
    local: list[Path]  # local train files of a stream
    names: frozenset[str]  # train files that are in no other split

    @property
    def facts(self) -> list[Fact]:
        return [self.fact(path) for path in self.objects]

    def fact(self, path: str) -> Fact:
        item = self.objects[path][0]
        return str(item.address), item.size, item.tag


_known: ContextVar[list[list[Fact]] | None] = ContextVar("known", default=None)


@contextmanager
def as_found(sections: list[list[Fact]]) -> Iterator[None]:
    """Refuse reads in this context if a section's files differ from an earlier listing: listings may be eventually
    consistent, and cache keys use the earlier one."""
    before = _known.set(sections)
    try:
        yield
    finally:
        _known.reset(before)


def display_name(data: DataSection) -> str:
    """Name of all the section's files together."""
    if data.source is not None:
        return data.source
    return next(text for key, text in data.addresses if key == "data.train") if data.stream else "files elsewhere"


def facts(data: DataSection, splits: Splits) -> list[Fact]:
    """Address, size and tag of every remote file that is read; queries the stores. `splits`: lists the files of a
    section without addresses. Errors: `RunError`, naming key and address."""
    return _find(data, splits).facts if data.addresses else []


def shards(data: DataSection, splits: Splits, among: int = 1) -> ShardCache | list[Path]:
    """Files of train: remote ones as a `ShardCache` with nothing fetched yet, or the local ones. `among`: as in
    `ShardCache`. Errors: `RunError`."""
    files = _unchanged_files(data, splits)
    return ShardCache(map(files.fact, files.shards), data.stream_cache_gb, among) if files.shards else files.local


@contextmanager
def downloaded(data: DataSection, splits: Splits) -> Iterator[DataSection]:
    """Download the section's files, if not cached, and yield the section with local paths.

    A stream's train files are listed by name only. Errors: `RunError`; errors raised inside the context name files as
    in the run file."""
    files = _unchanged_files(data, splits)
    identities = (path if path in files.names else files.fact(path) for path in files.objects)
    folder = cache_folder() / "remote" / digest(*identities)
    place = ACTIVITY.name
    try:
        cached(folder, lambda aside: _fetch(files, aside, data), folder.with_name(f"{folder.name}.parts"))
    except StoreError as error:
        raise RunError(error.code, f"{_key_of(data)}: {error.message}") from error
    finally:
        ACTIVITY.set(place)
    try:
        yield _local(data, files.paths, folder)
    except RunError as error:
        raise RunError(error.code, with_addresses(error.message, folder)) from error


def _unchanged_files(data: DataSection, splits: Splits) -> _RemoteFiles:
    """List the files. Errors: `RunError` if they differ from `as_found`."""
    files = _find(data, splits)
    if (known := _known.get()) is not None and files.facts not in known:
        raise RunError(
            "LS2174",
            f"{_key_of(data)}: the files at {data.addresses[0][1]} changed, or were listed incompletely, "
            "while the data was being prepared; run the command again",
        )
    return files


# -- listing ---------------------------------------------------------------------------------------------------------


def _key_of(data: DataSection) -> str:
    return data.addresses[0][0]


def _find(data: DataSection, splits: Splits) -> _RemoteFiles:
    """List the files that the section reads. Errors: `RunError`."""
    readers: dict[str, Readable] = {}
    objects: dict[str, tuple[Object, Readable]] = {}
    paths: dict[str, str] = {}
    for key, text in data.addresses:
        ACTIVITY.set(f"looking at {text}")
        try:
            address = address_of(text)
        except InvalidValue as error:
            raise RunError(error.code, f"{key}: {error.message}") from None
        try:
            if address.root not in readers:
                readers[address.root] = reader(address, key)
            store = readers[address.root]
            listed = _objects(store, address, text.endswith("/"))
        except StoreError as error:
            raise RunError(error.code, f"{key}: {error.message}") from error
        if not listed:
            raise RunError("LS2176", f"{key}: {text} does not exist; correct the address")
        if len(listed) > MOST:
            raise RunError(
                "LS2177",
                f"{key}: {text} holds {len(listed):,} files; select some of them with a pattern such as *.jsonl",
            )
        for each in listed:
            objects[path_of(each.address)] = (each, store)
        paths[text] = path_of(address)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        root = Path(folder)
        for path in objects:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        try:
            chosen = splits(_local(data, paths, root)) or {}
        except RunError as error:
            raise RunError(error.code, with_addresses(error.message, root)) from None
    used = {
        split: [below for file in files if (below := _below(file, root)) is not None] for split, files in chosen.items()
    }
    train = used.get("train", []) if data.stream else []
    local = [file for file in chosen.get("train", []) if _below(file, root) is None]
    if train and local:
        raise RunError(
            "LS2178",
            f"data.train: some shards of the stream are local ({local[0]}) and some are remote "
            f"({objects[train[0]][0].address}); put them all in one place",
        )
    others = {path for split, some in used.items() for path in some if split != "train"}
    several = sorted(others.union(used.get("train", [])))
    return _RemoteFiles({path: objects[path] for path in several}, paths, train, local, frozenset(train) - others)


def _objects(store: Readable, address: Address, folder: bool) -> list[Object]:
    """Objects that an address denotes: a file, matches of a pattern, or the content of a folder. Errors:
    `StoreError`."""
    if any(mark in address.path for mark in "*?["):
        start = re.split(r"[*?\[]", address.path)[0].rpartition("/")[0]
        listed = store.inside(Address(address.scheme, address.place, start))
        depth = address.path.count("/")
        same_depth = [each for each in listed if each.address.path.count("/") == depth]
        return [each for each in same_depth if fnmatchcase(each.address.path, address.path)]
    if not folder and address.path and (item := store.find(address)) is not None:
        return [item]
    if address.scheme in ("https", "http") and not folder:  # web servers cannot list
        return []
    listed = store.inside(address)
    folders = {str(address)}  # objects named like folders: empty markers that consoles create
    for each in listed:
        parts = each.address.path.split("/")
        folders |= {f"{address.root}/{'/'.join(parts[:depth])}" for depth in range(1, len(parts))}
    return [each for each in listed if str(each.address) not in folders and _is_name(each.address.path)]


def _is_name(path: str) -> bool:
    """Return whether an object's name is also a valid file path."""
    return all(part not in ("", ".", "..") for part in path.split("/"))


def _below(file: Path, root: Path) -> str | None:
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else None


def _local(data: DataSection, paths: Mapping[str, str], root: Path) -> DataSection:
    """The section with local paths in place of addresses."""
    return with_paths(data, lambda text: str(root / paths[text]) if text in paths else text)


# -- download --------------------------------------------------------------------------------------------------------


def _fetch(files: _RemoteFiles, folder: Path, data: DataSection) -> None:
    """Download all files, several at a time; complete ones are skipped. Errors: `StoreError`, `OSError`."""
    total, come = sum(each.size for path, (each, _) in files.objects.items() if path not in files.names), [0]
    what = data.addresses[0][1]

    def tell(count: int) -> None:
        come[0] += count
        ACTIVITY.set(f"downloading {what}, {come[0] / 1e6:,.1f} of {total / 1e6:,.1f} MB")

    def one(path: str) -> None:
        each, store = files.objects[path]
        to = folder / path
        if path in files.names:
            to.parent.mkdir(parents=True, exist_ok=True)
            return to.touch()
        if to.is_file() and to.stat().st_size == each.size:
            return tell(each.size)
        return fetch(store, each, to, tell)

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(one, path) for path in files.objects]:
            done.result()
