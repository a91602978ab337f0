"""Streams of remote shards: the same batches as from local ones, a bounded local copy, and network faults."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.run import Run
from lockstep.data import arrow_cache as shard_index
from lockstep.data import object_store, remote
from lockstep.data.cache import cache_folder
from lockstep.data.stream import ABOUT
from lockstep.data.streamed import Unreadable
from support.harness import run_on
from support.hub_server import Hub
from support.messages import mentions, raises
from support.store_server import BUCKET, Asked, Store
from support.stream_runs import SMALL, batches, content, feed_of, folder, refusal, shards, streamed, trained
from support.web_server import Served, web

pytestmark = pytest.mark.slow  # servers, ports and many small jobs

__all__ = ["folder", "web"]  # fixtures

RUN = ("batch_size=8", "epochs=2", "steps=null", "seed=3")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shard_index, "available_cores", lambda: 1)
    monkeypatch.setattr(object_store.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def on_web(web: Served, folder: Path, *overrides: str) -> Run:
    """Return a run that streams these files, with room for three of them."""
    web.files = content(folder)
    train = [f"{web.address}/{name}" for name in web.files if name.startswith("train")]
    room = 3 * max(map(len, web.files.values())) / 1e9
    data = SMALL | {"source": None, "train": train, "validation": f"{web.address}/validation.jsonl"}
    return streamed(folder, *RUN, f"data.stream_cache_gb={room}", *overrides, data=data)


def held() -> int:
    """Return the bytes of local copies."""
    found = 0
    for at, _, names in os.walk(cache_folder() / "shards"):  # other processes add and remove files meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                found += os.stat(f"{at}/{name}").st_size if name.endswith(".jsonl.gz") else 0
    return found


# -- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_the_same_batches_as_from_local_shards_in_a_bounded_cache(
    cores: int, web: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_index, "available_cores", lambda: cores)
    run = on_web(web, folder)
    feed, most = feed_of(run), run.data.stream_cache_gb * 1e9
    wanted = batches(feed_of(streamed(folder, *RUN, data=SMALL)))
    found = []
    for step in range(feed.total):
        batch = feed.make(step)
        found.append(
            (batch.ids.tolist(), [(m.inputs["input_ids"].tolist(), m.targets.tolist()) for m in batch.micro_batches])
        )
        assert 0 < held() <= most
    assert found == wanted
    web.asked.clear()
    after = feed.total - 20
    assert batches(feed_of(run), after) == wanted[after:]  # a resume downloads what it reads, and little ahead
    assert len(web.asked) <= 20 * 8 // 40 + 2 + remote.AHEAD
    assert batches(feed_of(run, 1, 2), after)[0][0] == wanted[after][0]


def test_read_shards_are_evicted_before_prefetched_ones(web: Served, folder: Path) -> None:
    run = on_web(web, folder)
    feed_of(run)
    told = next((cache_folder() / "tokens").rglob(ABOUT))
    made = remote.ShardCache(json.loads(told.read_text())["files"], run.data.stream_cache_gb)
    waits, read, *others = made.paths
    for path in (waits, read):
        made.fetch(path)
    made.opened(read).close()
    made.done_with(read)
    for path in others:
        made.fetch(path)
        if not read.exists():
            break
    assert not read.exists()
    assert waits.exists()


@pytest.mark.parametrize("fault", ["cut", "slow", 503], ids=str)
def test_transient_faults_are_retried(fault: int | str, web: Served, folder: Path) -> None:
    run = on_web(web, folder)
    web.faults = {name: [fault] * 2 for name in web.files}
    wanted = batches(feed_of(streamed(folder, *RUN, data=SMALL)), 50)
    feed = feed_of(run)
    web.faults = {name: [fault] * 2 for name in web.files}
    assert batches(feed, 50) == wanted
    assert any(len(left) < 2 for left in web.faults.values())


@pytest.mark.parametrize("ending", [".parquet", ".tar"])
def test_other_formats(ending: str, web: Served, tmp_path: Path) -> None:
    folder = shards(tmp_path / "data", ending, [30, 20])
    task = {"task": {"text": "json.text", "label": "json.label"}} if ending == ".tar" else {}
    validation = shards(tmp_path / "other", sizes=[4]) / "validation.jsonl"
    if task:
        rows = [{"json": json.loads(line)} for line in validation.read_text().splitlines()]
        validation.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "validation.jsonl").write_bytes(validation.read_bytes())
    web.files = content(folder)
    train = [f"{web.address}/{name}" for name in web.files if name.startswith("train")]
    data = {"source": None, "train": train, "validation": str(validation)}  # it may be local
    assert batches(feed_of(streamed(folder, *RUN, data=data, **task))) == batches(
        feed_of(streamed(folder, *RUN, data={"validation": str(validation)}, **task))
    )


@pytest.mark.processes
def test_the_same_bits_on_two_processes(web: Served, folder: Path) -> None:
    run = on_web(web, folder, "strategy.name=ddp", "epochs=null", "steps=8")
    local = streamed(folder, "strategy.name=ddp", "batch_size=8", "steps=8", "seed=3", data=SMALL)
    (alone,) = run_on(1, trained, local)
    assert run_on(2, trained, run)[0] == alone


# -- faults ----------------------------------------------------------------------------------------------------------


def test_an_unreachable_server_stops_training_with_a_checkpoint(web: Served, folder: Path) -> None:
    run = on_web(web, folder)
    feed = feed_of(run)
    web.faults = {name: [503] * 1000 for name in web.files}
    with pytest.raises(Unreadable) as caught:
        batches(feed)
    assert mentions(str(caught.value), "LS2136", "503", f"{web.address}/train-0")
    assert caught.value.message.endswith("When it is available again, the same command resumes")
    web.faults = {}
    assert batches(feed_of(run)) == batches(feed_of(streamed(folder, *RUN, data=SMALL)))


@pytest.mark.parametrize("how", ["other", "gone", "cut off"])
def test_a_changed_remote_shard_is_refused_with_its_address(how: str, web: Served, folder: Path) -> None:
    run = on_web(web, folder)
    feed = feed_of(run)
    for name in [name for name in web.files if name.startswith("train")]:
        if how == "gone":
            del web.files[name]
        else:
            web.files[name] = web.files["train-00.jsonl.gz"] if how == "other" else web.files[name][:-9]
    web.files["train-00.jsonl.gz"] = b"what is this"
    with pytest.raises(Unreadable) as caught:
        batches(feed)
    said = "does not exist" if how == "gone" else "changed while it was being read"
    assert said in str(caught.value) or "does not exist" in str(caught.value)
    assert f"{web.address}/train-0" in str(caught.value)
    assert str(cache_folder()) not in str(caught.value)
    assert "Restore the file" in str(caught.value)


def test_bad_rows_and_shards_are_named_by_their_address(web: Served, folder: Path) -> None:
    run = on_web(web, folder)
    web.files["train-03.jsonl.gz"] = web.files["train-03.jsonl.gz"][:-20]
    assert f"cannot unpack {web.address}/train-03.jsonl.gz from row " in refusal(run)
    web.files["train-03.jsonl.gz"] = b""
    assert f"{web.address}/train-03.jsonl.gz" in refusal(run)
    del web.files["train-03.jsonl.gz"]
    assert refusal(run).startswith(
        f"data.train: {web.address}/train-03.jsonl.gz does not exist; correct the address [LS"
    )


def test_unsupported_remote_streams_are_refused(web: Served, folder: Path) -> None:
    run = on_web(web, folder, "data.stream_cache_gb=1e-6")
    assert refusal(run).startswith("data.stream_cache_gb: 1e-06 GB cannot hold two shards; the largest, http")
    run = on_web(web, folder)
    train = [*run.data.train[:1], str(folder / "train-01.jsonl.gz")]  # type: ignore[index]
    assert mentions(refusal(streamed(folder, data={"source": None, "train": train})), "LS2178")
    data = {"source": None, "train": run.data.train}
    assert mentions(refusal(streamed(folder, data=data)), "LS2260", "data.validation")
    with raises("LS1039", "stream_cache_gb"):
        streamed(folder, "data.stream=false", "data.stream_window=8192", "data.stream_cache_gb=3")


# -- the Hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as hub:
        from huggingface_hub import constants

        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.address)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        yield hub


@pytest.mark.slow
@pytest.mark.parametrize("source", ["user/set", "hf://datasets/user/set/data", "hf://datasets/user/set@main/data"])
def test_shards_of_the_hub_stay_at_one_commit(source: str, hub: Hub, folder: Path) -> None:
    files = {f"data/{name}": data for name, data in content(folder).items()}
    commit = hub.put("datasets", "user/set", files | {"README.md": b"# a set"})
    run = streamed(folder, *RUN, data=SMALL | {"source": source})
    wanted = batches(feed_of(streamed(folder, *RUN, data=SMALL)))
    feed = feed_of(run)
    assert f"@{commit}" in feed.task.prepared.facts["source"]
    assert batches(feed) == wanted
    index = feed.task.prepared.splits["train"]
    hub.put("datasets", "user/set", files | {"README.md": b"# another card"})
    assert feed_of(run).task.prepared.splits["train"] == index  # the same shards
    changed = hub.put("datasets", "user/set", {name: data for name, data in files.items() if "06" not in name})
    assert batches(feed) == wanted  # at its commit
    assert f"@{changed}" in feed_of(run).task.prepared.facts["source"]
    assert feed_of(run).task.prepared.key != feed.task.prepared.key


def test_shards_of_the_hub_are_compared_with_their_hash(hub: Hub, folder: Path) -> None:
    files = {f"data/{name}": data for name, data in content(folder).items()}
    commit = hub.put("datasets", "user/set", files)
    run = streamed(folder, *RUN, data=SMALL | {"source": "user/set"})
    there = hub.repositories["datasets", "user/set"].commits[commit]

    class Wrong(dict[str, bytes]):
        """A server that sends other bytes for a file than it announces."""

        def get(self, name: str, default: Any = None) -> Any:
            return super().get(name, default)[::-1] if "train-05" in name else super().get(name, default)

    hub.repositories["datasets", "user/set"].commits[commit] = Wrong(there)
    assert mentions(refusal(run), "LS2170", "data/train-05.jsonl.gz")


def test_files_missing_on_the_hub_are_reported(hub: Hub, folder: Path) -> None:
    hub.put("datasets", "user/set", {"train.jsonl": b'{"text": "a", "label": 1}\n'})
    assert "the Hub has no such repository" in refusal(streamed(folder, data={"source": "user/none"}))
    assert "it has no revision 'v9'" in refusal(streamed(folder, data={"source": "user/set", "revision": "v9"}))
    said = refusal(streamed(folder, data={"source": "user/set", "train": "other"}))
    assert said.startswith("data.train: user/set has no split 'other'; it has train [LS")


# -- an object store -------------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    pytest.importorskip("obstore", reason="needs the extras stores and cloud-tests")
    pytest.importorskip("moto", reason="needs the extras stores and cloud-tests")
    with Store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


@pytest.mark.extras
@pytest.mark.parametrize("cores", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_shards_of_a_bucket_with_faults(
    cores: int, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_index, "available_cores", lambda: cores)
    for name, data in content(folder).items():
        store.put(f"set/{name}", data)
    left: dict[str, list[str | int]] = {name: ["cut", 503] for name in content(folder)}

    def passing(asked: Asked) -> str | int | None:
        faults = left.get(asked.key.rpartition("/")[2], []) if asked.method == "GET" else []
        return faults.pop() if faults else None

    store.fault = passing
    room = 3 * max(map(len, content(folder).values())) / 1e9
    run = streamed(folder, *RUN, f"data.stream_cache_gb={room}", data=SMALL | {"source": f"s3://{BUCKET}/set"})
    feed = feed_of(run)
    assert batches(feed) == batches(feed_of(streamed(folder, *RUN, data=SMALL)))
    assert not any(left.values())
    assert held() <= room * 1e9
    for name, data in content(folder).items():
        store.put(f"set/{name}", data + b"\0")
    with raises("LS2148", f"s3://{BUCKET}/set/train-0", error=Unreadable):
        batches(feed)
