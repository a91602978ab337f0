"""gs:// and az:// as far as servers for them run locally: Azurite, and moto's S3 server, whose protocol resembles
Google's XML API. Uploads are complete, temporary failures go unnoticed, and data, streams and checkpoints make the
round trip."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import remote_sync as mirrors
from lockstep.checkpoint.manifest import FILE
from lockstep.config.data_sources import Address, address_of
from lockstep.data import arrow_cache as shard_index
from lockstep.data import object_store
from lockstep.data.object_store import Bucket, Patience, StoreError, download
from support.azure_server import Azure
from support.harness import digest
from support.messages import raises
from support.mirrors import always, copied, once
from support.saving import Job, here, run_in
from support.store_server import BUCKET, Proxy, Store
from support.stream_runs import SMALL, batches, feed_of, shards, streamed

pytestmark = [pytest.mark.extras, pytest.mark.processes]
QUICK = Patience(retry_s=5.0, tries=3, request_s=20.0, silent_s=10.0)


@pytest.fixture(scope="module", params=["gs", "az"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Proxy, dict[str, str]]]:
    """Return the scheme, the server, and the variables that redirect requests to it."""
    pytest.importorskip("obstore", reason="needs the extra stores")
    if request.param == "az":
        with Azure(tmp_path_factory.mktemp("az")) as azure:
            yield "az", azure, azure.environment
    else:
        pytest.importorskip("moto", reason="needs the extra cloud-tests")
        with Store() as store:
            yield "gs", store, store.as_google


@pytest.fixture
def store(server: tuple[str, Proxy, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    _, found, environment = server
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mirrors, "Bucket", lambda address, patience=None: Bucket(address, QUICK))
    monkeypatch.setattr(object_store, "PART", 5 * 2**20)
    yield found
    found.fault = lambda asked: None


@pytest.fixture
def place(server: tuple[str, Proxy, dict[str, str]], store: Proxy, request: pytest.FixtureRequest) -> Address:
    """A separate folder for each test."""
    return address_of(f"{server[0]}://{BUCKET}/{hashlib.sha256(request.node.name.encode()).hexdigest()[:8]}")


def put(place: Address, files: dict[str, bytes]) -> Bucket:
    bucket = Bucket(place, QUICK)
    for name, content in files.items():
        bucket.write(place.below(name), content)
    return bucket


def large(folder: Path) -> tuple[Path, str]:
    """Write a file of three parts; return its hash."""
    path = folder / "large.bin"
    path.write_bytes(os.urandom(11 * 2**20))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def test_objects_are_written_listed_read_and_removed(place: Address, tmp_path: Path) -> None:
    bucket = put(place, {"a b/x.txt": b"one", "y.txt": b"two"})
    assert [(str(each.address), each.size) for each in bucket.inside(place)] == [
        (f"{place}/a b/x.txt", 3),
        (f"{place}/y.txt", 3),
    ]
    file, sha256 = large(tmp_path)
    bucket.upload(file, place.below("large.bin"), sha256)
    found = bucket.find(place.below("large.bin"))
    assert found is not None
    assert download(bucket, found, tmp_path / "back.bin") == sha256
    bucket.write(place.below("large.bin"), b"other")
    with raises("LS2148", error=StoreError):
        download(bucket, found, tmp_path / "again.bin")
    bucket.remove(place.below("y.txt"))
    bucket.remove(place.below("y.txt"))
    assert bucket.find(place.below("y.txt")) is None
    with raises("LS2145", f"{place}/y.txt", error=StoreError):
        bucket.read(place.below("y.txt"))


@pytest.mark.parametrize("fault", [503, "cut"])
def test_transient_faults_are_retried(fault: str | int, store: Proxy, place: Address, tmp_path: Path) -> None:
    bucket = Bucket(place, QUICK)
    file, sha256 = large(tmp_path)
    store.fault = once(fault, fault, on="large.bin")
    bucket.upload(file, place.below("large.bin"), sha256)
    found = bucket.find(place.below("large.bin"))
    assert found is not None
    store.fault = once(fault, fault, on="large.bin", method="GET")
    assert download(bucket, found, tmp_path / "back.bin") == sha256


def test_permanent_faults_are_one_message(store: Proxy, place: Address) -> None:
    bucket = put(place, {"x": b"one"})
    store.fault = always(503, method="GET")
    with pytest.raises(StoreError) as caught:
        bucket.read(place.below("x"))
    assert caught.value.again
    assert "503" in str(caught.value)
    store.fault = always(403, method="GET")
    with raises("LS2147", "credentials", error=StoreError):
        bucket.read(place.below("x"))
    store.fault = lambda asked: None
    other = Address(place.scheme, "no-such-bucket", "x")
    with pytest.raises(StoreError) as caught:
        Bucket(other, QUICK).read(other)
    assert caught.value.absent
    assert "\n" not in str(caught.value)


def test_checkpoints_are_uploaded_and_restored(store: Proxy, place: Address, tmp_path: Path) -> None:
    def job(folder: Path) -> Job:
        return Job(run_in(folder, f"remote_dir={place}", "checkpoint.keep=2"))

    trained = job(tmp_path / "out")
    store.fault = once("cut", 503, on="shard-")
    state = [trained.saved() for _ in range(3)][-1]
    assert copied(trained) is None
    names = [each.address.path for each in Bucket(place, QUICK).inside(place.below("checkpoints"))]
    assert sorted(name.split("/")[-2] for name in names if name.endswith(FILE)) == ["step-000002", "step-000003"]
    other = job(tmp_path / "elsewhere")
    assert other.checkpoints.resume(other.strategy.state)[0] == 3
    assert digest(other.strategy.state.state_dict()) == state
    assert here(tmp_path / "elsewhere") == ["step-000003"]


def test_data_and_streams_are_read_from_stores(
    store: Proxy, place: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_index, "available_cores", lambda: 1)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    folder = shards(tmp_path / "data", ".jsonl.gz", [20] * 3)
    put(place, {path.name: path.read_bytes() for path in folder.iterdir()})
    here = ("batch_size=8", "epochs=1", "steps=null")
    wanted: dict[bool, Any] = {}
    for source in (str(folder), str(place)):
        for stream in (True, False):
            data: dict[str, Any] = {"source": source, **(SMALL if stream else {"stream": False, "stream_window": 8192})}
            store.fault = once(503, "cut", on="train-", method="GET")
            found = batches(feed_of(streamed(folder, *here, data=data)))
            assert found == wanted.setdefault(stream, found)
    with raises("LS2176", "nowhere"):
        feed_of(streamed(folder, *here, data=SMALL | {"source": f"{place}/nowhere"}))
