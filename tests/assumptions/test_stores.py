"""Assumptions about obstore, tested with moto's S3 server."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from support.assumed import rests_on_it
from support.store_server import BUCKET, SECRET, Store

obstore: Any = pytest.importorskip("obstore")
pytest.importorskip("moto")
pytestmark = pytest.mark.extras
KEYS = {"access_key_id": "AKIAIOSFODNN7EXAMPLE", "secret_access_key": SECRET, "region": "us-east-1"}
RETRY = {"max_retries": 1, "retry_timeout": timedelta(seconds=2)}


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    with Store() as running:
        yield running


def opened(server: Store, bucket: str = BUCKET, retry: Any = RETRY) -> Any:
    from obstore import store

    times = {name: timedelta(seconds=10) for name in ("timeout", "read_timeout", "connect_timeout")}
    options: dict[str, Any] = {"client_options": {**times, "allow_http": True}, "retry_config": retry}
    return store.S3Store(bucket, endpoint=server.address, **KEYS, **options)


@pytest.fixture
def bucket(server: Store) -> Iterator[Any]:
    yield opened(server)
    server.clear()


@rests_on_it("src/lockstep/data/object_store.py")
def test_the_head_of_an_object(bucket: Any) -> None:
    """head returns path, size, e_tag and last_modified, and raises FileNotFoundError for a missing object."""
    obstore.put(bucket, "a/b", b"123", use_multipart=False)
    about = obstore.head(bucket, "a/b")
    assert (about["path"], about["size"]) == ("a/b", 3)
    assert about["e_tag"].strip('"') == hashlib.md5(b"123").hexdigest()
    assert about["last_modified"].isoformat()
    for absent in ("a", "a/c"):
        with pytest.raises(FileNotFoundError):
            obstore.head(bucket, absent)


@rests_on_it("src/lockstep/data/object_store.py")
def test_listing_a_folder_recursively(bucket: Any) -> None:
    """list with the prefix `a/` yields chunks of objects in that folder and below, but not in other folders whose names
    start with the same letters. The prefix None lists the whole bucket."""
    for name in ("a/1", "a/deep/2", "ab/3"):
        obstore.put(bucket, name, b"x", use_multipart=False)

    def names(prefix: str | None) -> list[str]:
        return sorted(each["path"] for chunk in obstore.list(bucket, prefix=prefix) for each in chunk)

    assert names("a/") == ["a/1", "a/deep/2"]
    assert names(None) == ["a/1", "a/deep/2", "ab/3"]


@rests_on_it("src/lockstep/data/object_store.py")
def test_a_range_ends_before_its_second_number(bucket: Any, tmp_path: Path) -> None:
    """get with range (start, stop) returns the bytes start to stop - 1, with their length, and can be written to a
    file. if_match with an older tag raises PreconditionError."""
    obstore.put(bucket, "r", b"0123456789", use_multipart=False)
    tag = obstore.head(bucket, "r")["e_tag"]
    block = obstore.get(bucket, "r", options={"range": (2, 5), "if_match": tag}).bytes()
    with open(tmp_path / "r", "wb") as file:
        file.write(block)
    assert (len(block), bytes(block), (tmp_path / "r").read_bytes()) == (3, b"234", b"234")
    obstore.put(bucket, "r", b"other 6789", use_multipart=False)
    with pytest.raises(Exception) as caught:
        obstore.get(bucket, "r", options={"range": (2, 5), "if_match": tag}).bytes()
    assert type(caught.value).__name__ == "PreconditionError" or "412" in str(caught.value)


@rests_on_it("src/lockstep/data/object_store.py")
def test_etags_of_uploads(bucket: Any, tmp_path: Path) -> None:
    """put of a file with chunk_size gives the object S3's multipart tag (the MD5 of its parts' MD5s, and the number of
    parts), or the MD5 of the file if it fits in one part."""
    part = 5 * 2**20
    for size, count in ((part + 7, 2), (100, 1)):
        content = bytes(range(256)) * (size // 256 + 1)
        (tmp_path / "file").write_bytes(content[:size])
        obstore.put(bucket, "big", tmp_path / "file", chunk_size=part, max_concurrency=4)
        parts = [hashlib.md5(content[:size][i : i + part]).digest() for i in range(0, size, part)]
        joined = f"{hashlib.md5(b''.join(parts)).hexdigest()}-{count}"
        tag = obstore.head(bucket, "big")["e_tag"].strip('"')
        assert tag in ({joined} if count > 1 else {joined, parts[0].hex()})
        assert obstore.head(bucket, "big")["size"] == size


@rests_on_it("src/lockstep/data/object_store.py")
def test_deleting_objects(bucket: Any) -> None:
    """delete removes an object. For a missing object it raises FileNotFoundError or nothing."""
    obstore.put(bucket, "gone", b"x", use_multipart=False)
    for _ in range(2):
        try:
            obstore.delete(bucket, "gone")
        except FileNotFoundError:
            continue
    with pytest.raises(FileNotFoundError):
        obstore.head(bucket, "gone")


@pytest.mark.parametrize(("status", "kinds"), [(403, {"PermissionDeniedError"}), (401, {"UnauthenticatedError"})])
@rests_on_it("src/lockstep/data/object_store.py")
def test_errors_for_refused_requests(server: Store, bucket: Any, status: int, kinds: set[str]) -> None:
    """Status 401 and 403 raise UnauthenticatedError and PermissionDeniedError, or an error that names the status."""
    server.fault = lambda asked: status
    with pytest.raises(Exception) as caught:
        obstore.get(bucket, "x").bytes()
    assert type(caught.value).__name__ in kinds or str(status) in str(caught.value)


@rests_on_it("src/lockstep/data/object_store.py")
def test_error_for_a_failing_server(server: Store, bucket: Any) -> None:
    """If every response has status 503, the request raises an error that names the status, within the time limit of the
    retries."""
    server.fault = lambda asked: 503
    before = len(server.asked)
    with pytest.raises(Exception, match="503"):
        obstore.get(bucket, "x").bytes()
    assert len(server.asked) - before == 2  # max_retries 1


@rests_on_it("src/lockstep/data/object_store.py")
def test_error_for_a_missing_bucket(server: Store) -> None:
    """The error for a bucket that does not exist contains NoSuchBucket, or says that it does not exist."""
    with pytest.raises(Exception, match=r"NoSuchBucket|specified bucket does not exist"):
        obstore.put(opened(server, "absent"), "x", b"1", use_multipart=False)


@rests_on_it("src/lockstep/data/object_store.py")
def test_unknown_options_are_refused(server: Store) -> None:
    """obstore raises for unknown client and retry options, and accepts all those that lockstep passes."""
    from obstore import store

    with pytest.raises(Exception) as caught:
        store.S3Store(BUCKET, **KEYS, client_options={"no_such_option": "1"})  # type: ignore[typeddict-unknown-key]
    assert not isinstance(caught.value, AssertionError)


@rests_on_it("src/lockstep/data/object_store.py")
def test_credentials_of_boto3_are_used(server: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with Boto3CredentialProvider signs requests with the session's credentials."""
    boto3 = pytest.importorskip("boto3")
    from obstore import store
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = boto3.Session(KEYS["access_key_id"], SECRET, region_name="us-east-1")
    options: dict[str, Any] = {"client_options": {"allow_http": True}, "retry_config": RETRY, "region": "us-east-1"}
    signed = store.S3Store(
        BUCKET, endpoint=server.address, credential_provider=Boto3CredentialProvider(session), **options
    )
    obstore.put(signed, "signed", b"1", use_multipart=False)
    assert bytes(obstore.get(signed, "signed").bytes()) == b"1"


@rests_on_it("src/lockstep/data/object_store.py")
def test_azures_account_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """AzureStore takes a container's name and the options that S3Store takes. It reads AZURE_STORAGE_ACCOUNT_NAME,
    AZURE_STORAGE_ACCOUNT_KEY and AZURE_STORAGE_ENDPOINT, signs requests with that key, and raises without an
    account."""
    from obstore import store

    options: Any = {"client_options": {"timeout": timedelta(seconds=10), "allow_http": True}, "retry_config": RETRY}
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(Exception, match=r"(?i)account"):
        store.AzureStore("texts", **options)
    requests = []

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            requests.append((self.path, self.headers["Authorization"]))
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "company")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"not a key").decode())
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(FileNotFoundError):
            obstore.head(store.AzureStore("texts", **options), "a/b.jsonl")
        server.shutdown()
    ((path, signed),) = requests
    assert path.endswith("texts/a/b.jsonl")
    assert signed.startswith("SharedKey company:")
