"""Files of a web server, and of a data set of the Hub: read only, by the standard library.

In: https://host/file or hf://datasets/USER/REPO/file; for the Hub HF_TOKEN, where it is set. Out: as `Readable` says.
A web server has no folders to list.
"""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from lockstep.config.data_sources import Address
from lockstep.config.redaction import one_line
from lockstep.data.hub_errors import explained, transient
from lockstep.data.object_store import Object, Patience, StoreError

_BLOCK = 2**20
_AGAIN = (408, 425, 429, 500, 502, 503, 504)


class Web:
    """A web server."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience

    def find(self, address: Address) -> Object | None:
        """See `Readable`."""
        try:
            with self._asked(address, "HEAD") as answer:
                size, tag = answer.headers.get("Content-Length"), answer.headers.get("ETag")
                tag = tag or answer.headers.get("Last-Modified")
        except StoreError as error:
            if error.absent:
                return None
            raise
        if size is None or tag is None:
            lacking = "its size" if size is None else "neither an ETag nor when it was changed"
            raise StoreError(f"{address}: the server does not say {lacking}; download the file and name that")
        return Object(address, int(size), tag)

    def inside(self, address: Address) -> list[Object]:
        """See `Readable`."""
        raise StoreError(f"{address}: what is in a folder of a web server cannot be listed; name each file")

    def blocks(self, found: Object, start: int) -> Iterator[bytes]:
        """See `Readable`."""
        with self._asked(found.address, "GET", start) as answer:
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            if tag != found.tag and self._tags:
                raise StoreError(f"{found.address} was changed while it was read; start again")
            left = start if answer.status != 206 else 0  # a server that knows no ranges begins at the beginning
            try:
                while block := answer.read(_BLOCK):
                    skipped = min(left, len(block))
                    left -= skipped
                    if len(block) > skipped:
                        yield block[skipped:]
            except (OSError, http.client.HTTPException) as error:
                raise StoreError(f"{found.address}: {one_line(error, 200)}", again=True) from None

    _tags = True

    def _asked(self, address: Address, method: str, start: int = 0) -> Any:
        """Errors: `StoreError`."""
        request = urllib.request.Request(self._url(address), method=method)
        if start:
            request.add_header("Range", f"bytes={start}-")
        for name, value in self._headers().items():
            request.add_unredirected_header(name, value)  # not for whoever the server sends us to
        try:
            return urllib.request.urlopen(request, timeout=self.patience.silent_s)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                raise StoreError(f"there is nothing at {address}", absent=True) from None
            if error.code in (401, 403):
                raise StoreError(f"{address}: access is refused ({error.code})") from None
            raise StoreError(f"{address}: the server answered {error.code}", again=error.code in _AGAIN) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise StoreError(f"{address} cannot be reached: {one_line(reason, 200)}", again=True) from None

    def _url(self, address: Address) -> str:
        return f"{address.root}/{quote(address.path, safe='/%')}"

    def _headers(self) -> dict[str, str]:
        return {}


class HubFiles(Web):
    """A data set of the Hub, at one revision."""

    _tags = False  # a redirection's are not the Hub's own; a listed file is found by its hash

    def __init__(self, address: Address, patience: Patience) -> None:
        super().__init__(patience)
        _, user, named = address.place.split("/")
        name, _, revision = named.partition("@")
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
            found: Any = (
                api.get_paths_info(self._repository, paths, **options)  # type: ignore[arg-type]
                if paths
                else list(api.list_repo_tree(self._repository, address.path or None, recursive=True, **options))  # type: ignore[arg-type]
            )
        except EntryNotFoundError:
            return []
        except Exception as error:  # whatever the Hub, the network and the library between raise
            raise StoreError(f"{address}: {explained(error, self._revision)}", transient(error)) from None
        return [
            Object(Address("hf", address.place, file.path), file.size, file.lfs.sha256 if file.lfs else file.blob_id)
            for file in found
            if isinstance(file, RepoFile)
        ]

    def _url(self, address: Address) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self._repository, address.path, repo_type="dataset", revision=self._revision)

    def _headers(self) -> dict[str, str]:
        token = os.environ.get("HF_TOKEN")
        return {"Authorization": f"Bearer {token.strip()}"} if token else {}
