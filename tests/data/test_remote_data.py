"""Remote data: on a web server, on the Hub by file names, and in an S3 store behind a proxy that injects faults."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import remote_sync
from lockstep.config.data_sources import address_of
from lockstep.config.errors import uncoded
from lockstep.config.run import Run, RunError
from lockstep.config.sections import DataSection
from lockstep.data import object_store, remote, source
from lockstep.data.job import Job
from lockstep.data.object_store import Patience, StoreError, Web
from support.hub_server import Hub
from support.messages import mentions, raises
from support.store_server import BUCKET, Asked, Store, server

__all__ = ["server"]  # fixtures

ROWS = "".join(json.dumps({"text": f"text {i}", "label": i % 2}) + "\n" for i in range(20_000)).encode()


def read(**data: Any) -> source.Source:
    return source.load(DataSection(**data), 0)


def refused(**data: Any) -> str:
    with pytest.raises(RunError) as caught:
        read(**data)
    return str(caught.value)


# -- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://host/train.jsonl", "unknown scheme ftp://; "),
        ("s3a://bucket/train.jsonl", "unknown scheme s3a://; did you mean s3://? known are s3://, gs://, az://, https"),
        ("file:///data/train.jsonl", "a file of this machine is named by its path alone"),
        ("s3://", "expected s3://BUCKET/path"),
        ("s3://bucket/../other/train.jsonl", "an address cannot contain . or .."),
        ("https://host/train.jsonl?download=1", "an address with ? or # cannot be used"),
        ("hf://models/user/repo/train.jsonl", "expected hf://datasets/USER/REPO/path"),
    ],
)
def test_an_invalid_address_is_refused(text: str, message: str) -> None:
    told = refused(train=text)
    assert told.startswith(f"data.train: {text}: ")
    assert message in told


@pytest.mark.parametrize(
    ("remote_dir", "message"),
    [
        ("bucket/run", "'bucket/run' is not an address"),
        ("https://host/run", "https:// can be read but not written"),
        ("s3://bucket", "names a whole bucket; name a folder in the bucket, such as s3://bucket/runs/emotion"),
        ("gcs://bucket/run", "unknown scheme gcs://; did you mean gs://?"),
    ],
)
def test_an_invalid_remote_dir_is_refused(remote_dir: str, message: str) -> None:
    with pytest.raises(RunError) as caught:
        Run.load({"remote_dir": remote_dir, "data": "builtin/emotion", "model": "gpt2"})
    assert "remote_dir" in str(caught.value)
    assert message in str(caught.value)


def test_output_must_be_a_local_folder() -> None:
    with raises("LS1101", "remote_dir=s3://bucket/run"):
        Run.load({"output": "s3://bucket/run", "data": "builtin/emotion", "model": "gpt2"})


def test_a_model_is_not_loaded_from_an_address() -> None:
    with raises("LS1100", "model.source", "s3://bucket/run/export"):
        Run.load({"data": "builtin/emotion", "model": "s3://bucket/run/export"})


def test_a_key_in_an_address_is_a_secret() -> None:
    with raises("LS1118", "data.train"):
        Run.load({"data": {"train": "s3://AKIAIOSFODNN7EXAMPLE:abcdefgh@bucket/train.jsonl"}, "model": "gpt2"})


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store.importlib.util, "find_spec", lambda name: None)
    assert uncoded(refused(train="gs://bucket/a.jsonl")) == (
        "data.train: gs://bucket/a.jsonl needs obstore, which is not installed: pip install 'lockstep-train[stores]'"
    )
    run = Run.load({"remote_dir": "s3://bucket/run", "data": "builtin/emotion", "model": "gpt2"})
    with raises("LS2139", "remote_dir: s3://bucket/run"):
        remote_sync.check(Job.of(run))


# -- a web server ----------------------------------------------------------------------------------------------------


class Files(SimpleHTTPRequestHandler):
    """A plain web server's files, without range requests. `cuts`: number of responses that end half way."""

    cuts = 0

    def copyfile(self, of: Any, to: Any) -> None:
        content = of.read()
        if self.cuts:
            type(self).cuts -= 1
            content = content[: len(content) // 2]
        to.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_files_of_a_web_server(web: str, tmp_path: Path) -> None:
    (tmp_path / "served/train.jsonl").write_bytes(ROWS)
    found = read(train=f"{web}/train.jsonl", validation=[f"{web}/train.jsonl"])
    assert {split: len(rows) for split, rows in found.splits.items()} == {"train": 20_000, "validation": 20_000}
    assert (
        uncoded(refused(train=f"{web}/other.jsonl"))
        == f"data.train: {web}/other.jsonl does not exist; correct the address"
    )
    assert "cannot be listed; name each file" in refused(train=f"{web}/*.jsonl")
    (tmp_path / "served/bad.jsonl").write_bytes(b'{"text": "a"}\n{"text"')
    assert f"{web}/bad.jsonl, line 2" in refused(train=f"{web}/bad.jsonl")


def test_a_truncated_response_is_requested_again(web: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "served/train.jsonl").write_bytes(ROWS)
    monkeypatch.setattr(Files, "cuts", 2)
    reader = Web(Patience(tries=4, silent_s=10.0))
    found = reader.find(address_of(f"{web}/train.jsonl"))
    assert found is not None
    object_store.download(reader, found, tmp_path / "there.jsonl")
    assert (tmp_path / "there.jsonl").read_bytes() == ROWS
    assert Files.cuts == 0
    monkeypatch.setattr(Files, "cuts", 99)
    with raises("LS2152", error=StoreError):
        object_store.download(reader, found, tmp_path / "other.jsonl")
    assert not (tmp_path / "other.jsonl").exists()


def test_changed_remote_files_are_read_again(web: str, tmp_path: Path) -> None:
    data = DataSection(train=f"{web}/train.jsonl")
    (tmp_path / "served/train.jsonl").write_bytes(ROWS)
    before = source.remote_facts(data)
    assert source.remote_facts(data) == before
    (tmp_path / "served/train.jsonl").write_bytes(ROWS + b'{"text": "more", "label": 1}\n')
    assert source.remote_facts(data) != before
    assert len(source.load(data, 0).splits["train"]) == 20_001
    with remote.as_found(before), raises("LS2174"):
        source.load(data, 0)


# -- the Hub, by file names ------------------------------------------------------------------------------------------


def test_files_of_a_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub() as hub:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        hub.put("datasets", "user/set", {"data/train.jsonl": ROWS, "data/test.jsonl": ROWS, "other.txt": b"x"})
        found = read(source="hf://datasets/user/set/data")
        assert {split: len(rows) for split, rows in found.splits.items()} == {"train": 20_000, "test": 20_000}
        assert len(read(train="hf://datasets/user/set/data/*.jsonl").splits["train"]) == 40_000
        assert mentions(refused(train="hf://datasets/user/none/train.jsonl"), "LS2138")


# -- an object store -------------------------------------------------------------------------------------------------


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.clear()


@pytest.mark.extras
def test_files_folders_and_patterns(store: Store) -> None:
    for split in ("train", "validation"):
        store.put(f"set/{split}.jsonl", ROWS)
    store.put("set/README.md", b"# a card")
    store.put("set/", b"")  # as consoles create a folder
    at = f"s3://{BUCKET}/set"
    both = {"train": 20_000, "validation": 20_000}
    for data in ({"source": at}, {"source": f"{at}/", "validation": "validation.jsonl"}):
        assert {split: len(rows) for split, rows in read(**data).splits.items()} == both
    assert read(source=at).name == at
    assert len(read(train=f"{at}/*.jsonl").splits["train"]) == 40_000
    assert store.sent("README", "GET") == 0  # only files in use are downloaded
    assert uncoded(refused(train=f"{at}/*.csv")) == f"data.train: {at}/*.csv does not exist; correct the address"
    assert (
        uncoded(refused(source=f"s3://{BUCKET}/none"))
        == f"data.source: s3://{BUCKET}/none does not exist; correct the address"
    )
    assert refused(train="s3://no-such-bucket/a.jsonl").startswith(
        "data.train: the bucket no-such-bucket does not exist"
    )


@pytest.mark.extras
def test_layouts_of_folders(store: Store) -> None:
    for label, text in (("pos", "good"), ("neg", "bad")):
        for i in range(3):
            store.put(f"imdb/train/{label}/{i}.txt", text.encode())
    store.put("pairs/train.en", b"one\ntwo\n")
    store.put("pairs/train.de", b"eins\nzwei\n")
    rows = read(source=f"s3://{BUCKET}/imdb", layout="class_folders").splits["train"]
    assert sorted(set(zip(rows["text"], rows["label"], strict=True))) == [("bad", "neg"), ("good", "pos")]
    rows = read(source=f"s3://{BUCKET}/pairs", layout="parallel").splits["train"]
    assert rows[1] == {"de": "zwei", "en": "two"}


@pytest.mark.extras
def test_sources_of_a_mixture(store: Store, tmp_path: Path) -> None:
    store.put("a.jsonl", ROWS)
    (tmp_path / "b.jsonl").write_bytes(ROWS)
    data = DataSection(sources=[f"s3://{BUCKET}/a.jsonl", str(tmp_path / "b.jsonl")])  # type: ignore[arg-type]
    assert len(source.load(data, 0, columns={"task.text": "text"}).splits["train"]) == 40_000
    assert source.is_local(data)
    assert [len(facts) for facts in source.remote_facts(data)] == [1]


@pytest.mark.extras
def test_cached_files_are_not_downloaded_again(store: Store) -> None:
    store.put("set/train.jsonl", ROWS)
    for _ in range(2):
        read(source=f"s3://{BUCKET}/set")
    assert store.sent("train.jsonl", "GET") == 1
    store.put("set/train.jsonl", ROWS + ROWS)
    assert len(read(source=f"s3://{BUCKET}/set").splits["train"]) == 40_000


@pytest.mark.extras
@pytest.mark.parametrize("fault", ["cut", 503], ids=str)
def test_a_download_survives_transient_faults(store: Store, fault: str | int) -> None:
    content = ROWS + f'{{"text": "{fault}", "label": 1}}\n'.encode()
    store.put("set/train.jsonl", content)
    left = [fault, fault]

    def passing(asked: Asked) -> str | int | None:
        return left.pop() if left and asked.method == "GET" and asked.key.endswith("train.jsonl") else None

    store.fault = passing
    assert len(read(source=f"s3://{BUCKET}/set").splits["train"]) == 20_001
    assert not left


@pytest.mark.extras
def test_a_killed_download_resumes(store: Store, tmp_path: Path, monkeypatch: Any) -> None:
    store.put("train.jsonl", ROWS)
    monkeypatch.setattr(object_store, "PART", 2**16)
    bucket = object_store.Bucket(address_of(f"s3://{BUCKET}/train.jsonl"), Patience(tries=2, retry_s=2.0))
    found = bucket.find(bucket.address)
    assert found is not None
    store.fault = lambda asked: 403 if asked.start >= 3 * 2**16 else None  # as far as it got before a kill
    with raises("LS2147", error=StoreError):
        object_store.download(bucket, found, tmp_path / "train.jsonl")
    store.fault = lambda asked: None
    store.asked.clear()
    object_store.download(bucket, found, tmp_path / "train.jsonl")
    assert (tmp_path / "train.jsonl").read_bytes() == ROWS
    assert min(asked.start for asked in store.asked if asked.method == "GET") == 3 * 2**16


@pytest.mark.extras
def test_a_file_that_changes_during_the_download_is_refused(store: Store, tmp_path: Path, monkeypatch: Any) -> None:
    store.put("train.jsonl", ROWS)
    monkeypatch.setattr(object_store, "PART", 2**16)
    bucket = object_store.Bucket(address_of(f"s3://{BUCKET}/train.jsonl"))
    found = bucket.find(bucket.address)
    assert found is not None
    store.put("train.jsonl", ROWS[::-1])
    with raises("LS2148", error=StoreError):
        object_store.download(bucket, found, tmp_path / "train.jsonl")


@pytest.mark.extras
def test_a_listing_that_lacks_files_the_second_time_is_refused(store: Store) -> None:
    for i in range(3):
        store.put(f"set/train-{i}.jsonl", ROWS)
    data = DataSection(source=f"s3://{BUCKET}/set")
    whole = source.remote_facts(data)
    store.hidden = lambda key: "train-2" in key
    with remote.as_found(whole), raises("LS2174"):
        source.load(data, 0)
