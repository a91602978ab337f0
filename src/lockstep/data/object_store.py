"""Object stores and web servers: listing, reading and writing what an address names.

In: an address (s3://, gs://, az://, https://). Out: sizes, tags, bytes; or a `StoreError` that names the address.

obstore accesses the stores, with credentials from the environment, and retries requests that fail with 5xx or without a
response. It was chosen because it supports all three stores in one wheel without dependencies that pin versions of
others (s3fs pins botocore), caches no listings, and releases the GIL during training. The standard library reads web
servers and Hub data sets (hf://datasets/USER/REPO/file, with HF_TOKEN if set); a web server has no folders to list.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from lockstep.config.data_sources import Address
from lockstep.config.errors import CodedError
from lockstep.config.redaction import one_line
from lockstep.config.run import RunError
from lockstep.data.hub import explained, transient

_BLOCK = 2**20
_AGAIN = (408, 425, 429, 500, 502, 503, 504)


class Web:
    """A web server."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience

    def find(self, address: Address) -> Object | None:
        """See `Readable`."""
        try:
            with self._request(address, "HEAD") as answer:
                size, tag = answer.headers.get("Content-Length"), answer.headers.get("ETag")
                tag = tag or answer.headers.get("Last-Modified")
        except StoreError as error:
            if error.absent:
                return None
            raise
        if size is None or tag is None:
            lacking = "its size" if size is None else "an ETag or a modification time"
            raise StoreError(
                "LS2130", f"{address}: the server does not report {lacking}; download the file and name the local copy"
            )
        return Object(address, int(size), tag)

    def inside(self, address: Address) -> list[Object]:
        """See `Readable`."""
        raise StoreError("LS2131", f"{address}: a folder on a web server cannot be listed; name each file")

    def blocks(self, item: Object, start: int) -> Iterator[bytes]:
        """See `Readable`."""
        with self._request(item.address, "GET", start) as answer:
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            if tag != item.tag and self._tags:
                raise StoreError("LS2132", f"{item.address} changed while it was being read; run the command again")
            unwanted = start if answer.status != 206 else 0  # a server without range support starts at 0
            try:
                while block := answer.read(_BLOCK):
                    skipped = min(unwanted, len(block))
                    unwanted -= skipped
                    if len(block) > skipped:
                        yield block[skipped:]
            except (OSError, http.client.HTTPException) as error:
                raise StoreError("LS2133", f"{item.address}: {one_line(error, 200)}", again=True) from None

    _tags = True

    def _request(self, address: Address, method: str, start: int = 0) -> Any:
        """Send a request and return the response. Errors: `StoreError`."""
        request = urllib.request.Request(self._url(address), method=method)
        if start:
            request.add_header("Range", f"bytes={start}-")
        for name, value in self._headers().items():
            request.add_unredirected_header(name, value)  # not sent to redirect targets
        try:
            return urllib.request.urlopen(request, timeout=self.patience.silent_s)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                raise StoreError("LS2134", f"{address} does not exist; correct the address", absent=True) from None
            if error.code in (401, 403):
                raise StoreError(
                    "LS2135",
                    f"{address}: the server refuses access (HTTP {error.code}); check the address and your permissions",
                ) from None
            raise StoreError(
                "LS2136",
                f"{address}: the server answered HTTP {error.code}; check the address, or try again later",
                again=error.code in _AGAIN,
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise StoreError(
                "LS2137",
                f"{address} is not reachable: {one_line(reason, 200)}; check the address and the network",
                again=True,
            ) from None

    def _url(self, address: Address) -> str:
        return f"{address.root}/{quote(address.path, safe='/%')}"

    def _headers(self) -> dict[str, str]:
        return {}


class HubFiles(Web):
    """A Hub data set at one revision."""

    _tags = False  # tags of redirects are not the Hub's; files are identified by their hash

    def __init__(self, address: Address, patience: Patience) -> None:
        super().__init__(patience)
        _, user, repository = address.place.split("/")
        name, _, revision = repository.partition("@")
        self._repository, self._revision = f"{user}/{name}", revision or None

    def find(self, address: Address) -> Object | None:
        """See `Readable`."""
        if not address.path:
            return None
        return next(iter(self._listed(address, [address.path])), None)

    def inside(self, address: Address) -> list[Object]:
        """See `Readable`."""
        return sorted(self._listed(address, None), key=lambda each: each.address.path)

    def _listed(self, address: Address, paths: list[str] | None) -> list[Object]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        api, options = HfApi(), {"repo_type": "dataset", "revision": self._revision}
        try:
            entries: Any = (
                api.get_paths_info(self._repository, paths, **options)  # type: ignore[arg-type]
                if paths
                else list(api.list_repo_tree(self._repository, address.path or None, recursive=True, **options))  # type: ignore[arg-type]
            )
        except EntryNotFoundError:
            return []
        except Exception as error:  # any error of Hub, network or library
            raise StoreError("LS2138", f"{address}: {explained(error, self._revision)}", transient(error)) from None
        return [
            Object(Address("hf", address.place, file.path), file.size, file.lfs.sha256 if file.lfs else file.blob_id)
            for file in entries
            if isinstance(file, RepoFile)
        ]

    def _url(self, address: Address) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self._repository, address.path, repo_type="dataset", revision=self._revision)

    def _headers(self) -> dict[str, str]:
        token = os.environ.get("HF_TOKEN")
        return {"Authorization": f"Bearer {token.strip()}"} if token else {}


PART = 16 * 2**20  # bytes per request
EXTRA = "pip install 'lockstep-train[stores]'"
# Sources of credentials, for messages.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the machine's role; AWS_REGION, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or another of Azure's variables",
}


_ENDPOINTS = {  # environment variables of custom endpoints
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


class StoreError(CodedError):
    """A failed request to a store: a one-line message without secrets."""

    def __init__(self, code: str, message: str, again: bool = False, absent: bool = False) -> None:
        """`again`: a retry may succeed. `absent`: the object does not exist."""
        super().__init__(code, message)
        self.again, self.absent = again, absent


@dataclass(frozen=True)
class Patience:
    """Retry and timeout limits of requests to a store."""

    retry_s: float = 120.0  # total time of retries after the first failure
    tries: int = 8  # attempts per request, and per download without progress
    request_s: float = 600.0  # timeout of one request (a part of a file)
    silent_s: float = 60.0  # timeout without data within a response


BRIEF = Patience(retry_s=15.0, tries=3, request_s=30.0, silent_s=15.0)  # interactive, before a run


@dataclass(frozen=True)
class Object:
    """An existing object."""

    address: Address
    size: int  # bytes
    tag: str  # version of the content: ETag, or modification time


class Readable(Protocol):
    """A location to read from: a bucket, a web server, a Hub data set."""

    patience: Patience

    def find(self, address: Address) -> Object | None:
        """The object at this address, or None. Errors: `StoreError`."""

    def inside(self, address: Address) -> list[Object]:
        """All objects under `address/`, sorted by name. Errors: `StoreError`."""

    def blocks(self, item: Object, start: int) -> Iterator[Any]:
        """Yield the object's bytes from `start`. Errors: `StoreError`, also if it has changed since it was listed."""


def require(address: Address, key: str) -> None:
    """Check that the library for this store is installed. Errors: `RunError`."""
    if importlib.util.find_spec("obstore") is None:
        raise RunError("LS2139", f"{key}: {address} needs obstore, which is not installed: {EXTRA}")


class Bucket:
    """A bucket or container."""

    def __init__(self, address: Address, patience: Patience | None = None) -> None:
        """Sends no request. Errors: `StoreError` for unusable credentials."""
        import obstore

        self.address, self.patience = address, patience or Patience()
        self._calls = obstore
        with self._asking(address):
            self._store: Any = self._opened()

    @contextmanager
    def _asking(self, address: Address) -> Iterator[None]:
        """Convert any obstore or boto3 error to `StoreError`."""
        try:
            yield
        except Exception as error:
            raise self._store_error(error, address) from None

    def _opened(self) -> Any:
        from obstore import store

        patience = self.patience
        endpoints = (os.environ.get(name) for name in _ENDPOINTS[self.address.scheme])
        plain = next(filter(None, endpoints), "").startswith("http://")
        options: Any = {
            "client_options": {
                "timeout": timedelta(seconds=patience.request_s),
                "read_timeout": timedelta(seconds=patience.silent_s),
                "connect_timeout": timedelta(seconds=min(10.0, patience.silent_s)),
                **({"allow_http": True} if plain else {}),  # implied by an http endpoint
            },
            "retry_config": {"max_retries": patience.tries, "retry_timeout": timedelta(seconds=patience.retry_s)},
        }
        if self.address.scheme == "gs":
            return store.GCSStore(self.address.place, **options)
        if self.address.scheme == "az":
            return store.AzureStore(self.address.place, **options)
        return store.S3Store(self.address.place, **options, **_aws())

    def find(self, address: Address) -> Object | None:
        """See `Readable`."""
        with self._asking(address), suppress(FileNotFoundError):
            return self._object(self._calls.head(self._store, address.path))
        return None

    def inside(self, address: Address) -> list[Object]:
        """See `Readable`."""
        with self._asking(address):
            listed = self._calls.list(self._store, prefix=f"{address.path}/" if address.path else None)
            objects = [self._object(each) for chunk in listed for each in chunk]
        return sorted(objects, key=lambda each: each.address.path)

    def blocks(self, item: Object, start: int) -> Iterator[Any]:
        """See `Readable`."""
        tagged = item.tag.startswith(('"', "W/"))
        while start < item.size:
            stop = min(start + PART, item.size)
            options: Any = {"range": (start, stop), **({"if_match": item.tag} if tagged else {})}
            with self._asking(item.address):
                block = self._calls.get(self._store, item.address.path, options=options).bytes()
            yield block
            start += len(block)
            if not len(block):
                return

    def read(self, address: Address) -> bytes:
        """Read a small object. Errors: `StoreError`."""
        with self._asking(address):
            return bytes(self._calls.get(self._store, address.path).bytes())

    def write(self, address: Address, content: bytes) -> None:
        """Write a small object in one request and verify it by reading it back. Errors: `StoreError`."""
        with self._asking(address):
            self._calls.put(self._store, address.path, content, use_multipart=False)
        if self.read(address) != content:
            raise StoreError(
                "LS2140",
                f"{address} does not contain the data that was written to it; check the store and run the "
                "command again",
                again=True,
            )

    def remove(self, address: Address) -> None:
        """Delete an object, if it exists. Errors: `StoreError`."""
        with self._asking(address), suppress(FileNotFoundError):
            self._calls.delete(self._store, address.path)

    def upload(self, file: Path, address: Address, sha256: str) -> None:
        """Upload a file with a known hash and verify it: its size and, if the store reports S3's checksum of parts,
        that checksum; otherwise the object is read back and hashed.

        Errors: `StoreError`; `OSError` if the file cannot be read."""
        whole, parts = hashlib.sha256(), []
        with open(file, "rb") as opened:
            while block := opened.read(PART):
                whole.update(block)
                parts.append(hashlib.md5(block, usedforsecurity=False))
        if whole.hexdigest() != sha256:
            raise StoreError(
                "LS2141",
                f"{file} no longer matches its recorded hash, so it is not uploaded; the file changed or is damaged",
            )
        size = file.stat().st_size
        with self._asking(address):
            self._calls.put(self._store, address.path, file, chunk_size=PART, max_concurrency=4)
        stored_object = self.find(address)
        if stored_object is None or stored_object.size != size:
            there = "is not there" if stored_object is None else f"has {stored_object.size:,} bytes, and not {size:,}"
            raise StoreError("LS2142", f"{address} {there} after the upload", again=True)
        joined = hashlib.md5(b"".join(part.digest() for part in parts), usedforsecurity=False).hexdigest()
        tags = {f"{joined}-{len(parts)}", *(part.hexdigest() for part in parts[:1] if len(parts) == 1)}
        if stored_object.tag.strip('"') in tags:
            return
        stored = hashlib.sha256()
        for block in self.blocks(stored_object, 0):
            stored.update(block)
        if stored.hexdigest() != sha256:
            raise StoreError(
                "LS2143",
                f"{address} differs from the uploaded data (different hash); run the command again",
                again=True,
            )

    def _object(self, metadata: Any) -> Object:
        tag = metadata["e_tag"] or metadata["last_modified"].isoformat()
        return Object(
            Address(self.address.scheme, self.address.place, metadata["path"]), int(metadata["size"]), str(tag)
        )

    def _store_error(self, error: Exception, address: Address) -> StoreError:
        """Convert a request's error to a readable `StoreError`."""
        message = str(error).split("Debug source")[0]
        cause = one_line(message, 300)
        kind, where = type(error).__name__, _CREDENTIALS[address.scheme]
        status = re.search(r"status code: (\d{3})|Client error with status (\d{3})", message)
        number = int(status[1] or status[2]) if status else 0
        if re.search(r"NoSuchBucket|ContainerNotFound|specified bucket does not exist", message):
            return StoreError(
                "LS2144", f"the bucket {address.place} does not exist; create it, or correct the address", absent=True
            )
        if isinstance(error, FileNotFoundError):
            return StoreError("LS2145", f"{address} does not exist; correct the address", absent=True)
        if "redential" in message and number == 0:
            return StoreError(
                "LS2146", f"no credentials found for {address.root} (looked in {where}): {one_line(message, 200)}"
            )
        if kind in ("PermissionDeniedError", "UnauthenticatedError") or number in (401, 403):
            return StoreError(
                "LS2147", f"{address.root} refuses access ({number or 403}): check the credentials ({where})"
            )
        if kind == "PreconditionError" or number == 412:
            return StoreError("LS2148", f"{address} changed while it was being read; run the command again")
        if number in (301, 307, 400) and address.scheme == "s3":
            return StoreError(
                "LS2149",
                f"{address.root} answered {number}: check that AWS_REGION is the region of the bucket: {cause}",
            )
        if number:
            return StoreError(
                "LS2150",
                f"{address} is not available now: the store answered HTTP {number}; try again later",
                again=True,
            )
        again = "error sending request" in message or "timed out" in message.lower() or "connect" in message.lower()
        return StoreError("LS2151", f"{address}: {cause}", again=again or "body" in message)


def _aws() -> dict[str, Any]:
    """AWS credentials from boto3 that obstore does not support: profiles and single sign-on in ~/.aws."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE"):
        return {}
    if importlib.util.find_spec("boto3") is None:
        return {}
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = boto3.Session()
    if session.get_credentials() is None:
        raise ValueError("no Credentials in the environment, in ~/.aws, or by a role of this machine")
    return {"credential_provider": Boto3CredentialProvider(session)}


def download(store: Readable, item: Object, to: Path, tell: Callable[[int], None] = lambda count: None) -> str:
    """Download an object to a temporary file and rename it when complete; return its SHA-256.

    Resumes after a kill and reconnects after a lost connection. `tell`: callback for the number of bytes received.
    Errors: `StoreError`; `OSError` if the file cannot be written."""
    name_hash = hashlib.sha256(f"{item.address} {item.size} {item.tag}".encode()).hexdigest()[:12]
    aside, tries = to.with_name(f".{to.name}.{name_hash}.tmp"), 0
    to.parent.mkdir(parents=True, exist_ok=True)
    with open(aside, "ab") as file:
        while (start := file.tell()) < item.size:
            try:
                for block in store.blocks(item, start):
                    file.write(block)
                    tell(len(block))
                if file.tell() == start:
                    raise StoreError(
                        "LS2152",
                        f"{item.address} ended after {start:,} of {item.size:,} bytes; run the command again",
                        again=True,
                    )
            except StoreError as error:
                tries = tries + 1 if file.tell() == start else 1
                if not error.again or tries >= store.patience.tries:
                    raise
                time.sleep(min(0.1 * 2**tries, 5.0))
        if file.tell() > item.size:
            raise StoreError(
                "LS2153",
                f"{item.address} is longer than the {item.size:,} bytes that the server reported; run the "
                "command again",
            )
        file.flush()
        os.fsync(file.fileno())
    with open(aside, "rb") as whole:
        sha256 = hashlib.file_digest(whole, "sha256").hexdigest()
    os.replace(aside, to)
    return sha256
