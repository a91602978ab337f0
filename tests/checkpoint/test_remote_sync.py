"""Checkpoints and exports in an object store: a real S3 server (moto) behind a proxy that cuts, refuses, delays and
drops requests. One process, step by step."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import remote_sync as mirrors
from lockstep.checkpoint import shard_files
from lockstep.checkpoint.manifest import FILE
from lockstep.config.run import RunError
from lockstep.data.object_store import Bucket, Patience
from lockstep.training import publish
from support.harness import digest
from support.messages import mentions, raises
from support.mirrors import MIRROR, always, copied, job, once
from support.saving import here, job_of, run_in, trained
from support.store_server import BUCKET, SECRET, Store, server

__all__ = ["server"]  # fixtures

pytestmark = pytest.mark.extras
AT = "runs/tiny/checkpoints"
SHARD = "shard-00001-of-00001.safetensors"


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    quick = Patience(retry_s=5.0, tries=3, request_s=20.0, silent_s=10.0)
    monkeypatch.setattr(mirrors, "Bucket", lambda address, patience=None: Bucket(address, quick))
    yield server
    server.clear()


def steps_in(store: Store) -> list[str]:
    """Return the steps in the store whose checkpoint has a manifest."""
    return sorted(key.split("/")[-2] for key in store.names(AT) if key.endswith(FILE))


# -- upload ----------------------------------------------------------------------------------------------------------


def test_only_kept_checkpoints_are_uploaded(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    for _ in range(4):
        trained.saved()
        assert copied(trained) is None
    assert steps_in(store) == ["step-000003", "step-000004"]
    assert store.names(AT) == [
        f"{AT}/index.json",
        *(f"{AT}/step-00000{n}/{file}" for n in (3, 4) for file in (FILE, SHARD)),
    ]
    for name in (FILE, SHARD):
        local = tmp_path / "out/checkpoints/step-000004" / name
        assert store.get(f"{AT}/step-000004/{name}") == local.read_bytes()
    assert json.loads(store.get(f"{AT}/index.json")) == {"steps": [3, 4]}
    assert not trained.said


def test_the_manifest_is_uploaded_last(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    trained.saved()
    copied(trained)
    put = [asked.key.rpartition("/")[2] for asked in store.asked if asked.method == "PUT"]
    assert put.index(SHARD) < put.index(FILE) < put.index("index.json")


def test_uploaded_files_are_not_sent_again(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    trained.saved()
    copied(trained)
    again = job(tmp_path / "out")
    assert copied(again) is None
    assert store.sent(SHARD) == 1


def test_a_part_stored_differently_is_detected(tmp_path: Path, store: Store, monkeypatch: Any) -> None:
    """A part stored differently is an error; the object is read back if its checksum cannot be computed locally."""
    trained = job(tmp_path / "out")
    trained.saved()
    real = Bucket.find

    def otherwise(self: Bucket, address: Any) -> Any:
        if SHARD in address.path and address.path in store.names():
            store.flip(address.path)
        return real(self, address)

    monkeypatch.setattr(Bucket, "find", otherwise)
    assert "different hash" in str(copied(trained))
    assert steps_in(store) == []


# -- download --------------------------------------------------------------------------------------------------------


def test_a_new_machine_resumes_from_the_newest_checkpoint(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    trained.saved()
    state = trained.saved()
    copied(trained)
    other = job(tmp_path / "elsewhere")
    assert other.checkpoints.resume(other.strategy.state)[0] == 2
    assert digest(other.strategy.state.state_dict()) == state
    assert here(tmp_path / "elsewhere") == ["step-000002"]


def test_the_newer_of_two_machines_checkpoints_is_used(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    trained.saved()
    copied(trained)
    second = job(tmp_path / "elsewhere")
    second.done, _ = second.checkpoints.resume(second.strategy.state)
    state = second.saved()
    copied(second)
    back = job(tmp_path / "out")
    step, notes = back.checkpoints.resume(back.strategy.state)
    assert (step, digest(back.strategy.state.state_dict())) == (2, state)
    assert notes == [f"step-000002 in {MIRROR} was downloaded and verified"]


def test_without_a_manifest_it_is_no_checkpoint(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    trained.saved()
    trained.saved()
    copied(trained)
    store.remove(f"{AT}/step-000002/{FILE}")  # as after a kill
    other = job(tmp_path / "elsewhere")
    other.done = other.checkpoints.resume(other.strategy.state)[0]
    assert other.done == 1
    other.saved()
    copied(other)
    assert steps_in(store) == ["step-000001", "step-000002"]


def test_partial_uploads_are_removed_later(tmp_path: Path, store: Store) -> None:
    store.put(f"{AT}/step-000001/{SHARD}", b"half of it")
    trained = job(tmp_path / "out")
    trained.step()
    trained.saved()
    copied(trained)
    assert [key for key in store.names(AT) if "step-000001" in key] == []


def test_a_flipped_byte_falls_back_to_the_previous_checkpoint(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    state = trained.saved()
    trained.saved()
    copied(trained)
    store.flip(f"{AT}/step-000002/{SHARD}")
    other = job(tmp_path / "elsewhere")
    other.done, notes = other.checkpoints.resume(other.strategy.state)
    assert other.done == 1
    assert digest(other.strategy.state.state_dict()) == state
    assert notes[0] == f"step-000002 in {MIRROR} is damaged ({SHARD} does not match its hash) and is not used"
    other.saved()  # the same step again: the damaged object is overwritten
    assert copied(other) is None
    third = job(tmp_path / "third")
    assert third.checkpoints.resume(third.strategy.state)[0] == 2


def test_a_run_with_only_damaged_checkpoints_is_refused(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    trained.saved()
    copied(trained)
    store.flip(f"{AT}/step-000001/{SHARD}")
    before = {key: store.get(key) for key in store.names()}
    other = job(tmp_path / "elsewhere")
    with raises("LS6050", SHARD, "another mirror"):
        other.checkpoints.resume(other.strategy.state)
    assert before == {key: store.get(key) for key in store.names()}


def test_a_damaged_local_checkpoint_is_downloaded(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    state = trained.saved()
    copied(trained)
    shard = tmp_path / "out/checkpoints/step-000001" / SHARD
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff\x00"[:1])
    again = job(tmp_path / "out")
    step, notes = again.checkpoints.resume(again.strategy.state)
    assert (step, digest(again.strategy.state.state_dict())) == (1, state)
    assert "is damaged" in notes[0]
    assert "was downloaded" in notes[1]


def test_a_stale_listing(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    trained.saved()
    trained.saved()
    copied(trained)
    store.hidden = lambda key: "step-000002" in key
    other = job(tmp_path / "elsewhere")
    assert other.checkpoints.resume(other.strategy.state)[0] == 2
    store.remove(f"{AT}/index.json")  # control: the index names it
    third = job(tmp_path / "third")
    assert third.checkpoints.resume(third.strategy.state)[0] == 1


def test_the_best_one_is_fetched_for_the_export(tmp_path: Path, store: Store) -> None:
    keys = ("checkpoint.best=-loss", "evaluate.every=1", "checkpoint.keep=1")
    trained = job(tmp_path / "out", *keys)
    best = trained.saved(loss=0.5)
    trained.saved(loss=0.9)
    copied(trained)
    assert steps_in(store) == ["step-000001", "step-000002"]
    other = job(tmp_path / "elsewhere", *keys)
    assert other.checkpoints.resume(other.strategy.state)[0] == 2
    assert other.checkpoints.take_best(other.strategy.state, 2, -0.9)[0] == 1
    assert digest(other.strategy.state.state_dict()) == best


def test_names_outside_of_the_folder_are_refused(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    trained.saved()
    copied(trained)
    found = mirrors.parsed(store.get(f"{AT}/step-000001/{FILE}"), "step-000001")
    assert not isinstance(found, str)
    evil = mirrors.Manifest(**{**found.__dict__, "hashes": {"../../evil": "0" * 64}})
    store.put(f"{AT}/step-000001/{FILE}", evil.dump())
    other = job(tmp_path / "elsewhere")
    with raises("LS6050", "../../evil"):
        other.checkpoints.resume(other.strategy.state)


# -- network faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut", 503, 500], ids=str)
def test_transient_faults_are_retried(tmp_path: Path, store: Store, fault: str | int) -> None:
    store.fault = once(fault, fault, on=SHARD)
    trained = job(tmp_path / "out")
    trained.saved()
    assert copied(trained) is None
    assert steps_in(store) == ["step-000001"]
    assert store.sent(SHARD) == 3
    assert not trained.said


@pytest.mark.parametrize("fault", ["cut", 503, 403], ids=str)
def test_a_permanent_fault_is_reported_and_retried(tmp_path: Path, store: Store, fault: str | int) -> None:
    store.fault = always(fault, on=SHARD)
    trained = job(tmp_path / "out")
    trained.saved()
    assert copied(trained) is not None
    assert steps_in(store) == []
    trained.step()
    trained.checkpoints.advance()
    assert "could not be copied" in trained.said[0]
    assert SECRET not in "".join(trained.said)
    assert "step-000001 is not in" in str(trained.checkpoints.catalog.rest(0.0))
    store.fault = lambda asked: None
    trained.saved()  # the next save also uploads the older checkpoint
    assert copied(trained) is None
    assert steps_in(store) == ["step-000001", "step-000003"]
    assert trained.checkpoints.catalog.rest(0.0) is None


@pytest.mark.parametrize("fault", ["cut", 503], ids=str)
def test_an_interrupted_download_continues(tmp_path: Path, store: Store, fault: str | int) -> None:
    trained = job(tmp_path / "out")
    state = trained.saved()
    copied(trained)
    store.fault = once(fault, fault, on=SHARD, method="GET")
    other = job(tmp_path / "elsewhere")
    other.checkpoints.resume(other.strategy.state)
    assert digest(other.strategy.state.state_dict()) == state


def test_on_a_slow_link_training_does_not_wait(tmp_path: Path, store: Store) -> None:
    store.slow_s = 0.2
    trained = job(tmp_path / "out")
    trained.saved()
    mirror = trained.checkpoints.mirror
    assert mirror is not None
    until = time.monotonic() + 60
    while not any(each.method == "PUT" for each in store.asked) and time.monotonic() < until:
        time.sleep(0.01)  # until the first upload starts
    for _ in range(5):  # only the last two are kept, besides the one being uploaded
        trained.saved()
    assert mirror.busy
    assert here(tmp_path / "out") == ["latest", "step-000001", "step-000005", "step-000006"]
    store.slow_s = 0.0
    assert copied(trained) is None
    assert steps_in(store) == ["step-000005", "step-000006"]
    assert here(tmp_path / "out") == ["latest", "step-000005", "step-000006"]


# -- refusals before training ----------------------------------------------------------------------------------------


def refused(run: Any) -> str:
    with pytest.raises(RunError) as caught:
        mirrors.check(job_of(run))
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_an_unwritable_store_is_refused_before_training(tmp_path: Path, store: Store, monkeypatch: Any) -> None:
    run = run_in(tmp_path / "out", f"remote_dir={MIRROR}")
    assert mirrors.check(job_of(run)) == []
    assert store.names() == []  # the trial left nothing
    store.fault = always(403)
    assert refused(run).startswith(
        f"remote_dir: s3://{BUCKET} refuses access (403): check the credentials (AWS_ACCESS_KEY"
    )
    store.fault = always(503)
    assert mentions(refused(run), "LS2150", "503")
    store.fault = lambda asked: None
    other = run_in(tmp_path / "out", "remote_dir=s3://no-such-bucket/run")
    assert refused(other).startswith(
        "remote_dir: the bucket no-such-bucket does not exist; create it, or correct the address [LS"
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "until it answers, lockstep cannot tell whether there are checkpoints" in refused(run)


def test_an_unreachable_store_does_not_stop_a_run_with_checkpoints(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    trained.saved()
    copied(trained)
    store.fault = lambda asked: 503
    (note,) = mirrors.check(job_of(trained.run))
    assert note.endswith("checkpoints are copied when it can be reached")
    again = job(tmp_path / "out")
    step, notes = again.checkpoints.resume(again.strategy.state)
    assert step == 1
    assert "only the checkpoints in" in notes[0]
    empty = job(tmp_path / "elsewhere")
    with raises("LS6040"):
        empty.checkpoints.resume(empty.strategy.state)


def test_another_run_in_the_mirror_is_refused(tmp_path: Path, store: Store) -> None:
    trained = job(tmp_path / "out")
    trained.saved()
    copied(trained)
    other = job(tmp_path / "elsewhere", "seed=7")
    with pytest.raises(
        RunError,
        match=rf"{MIRROR} holds a checkpoint \(step 1\) of a run with other settings .*: \[LS\d+\]\n  seed",
    ):
        mirrors.check_other(job_of(other.run))
    with pytest.raises(RunError, match="or give another mirror"):
        other.checkpoints.resume(other.strategy.state)


def test_a_model_rescued_from_a_full_disk_is_uploaded(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is uploaded to the mirror and nothing else; without its checkpoint the run is not finished."""
    run = run_in(tmp_path / "out", f"remote_dir={MIRROR}", f"checkpoint.rescue={tmp_path}/rescue")
    real = publish.write_export

    def full(*given: Any) -> Path:
        if len(given) < 5:
            raise OSError(28, "No space left on device")
        return real(*given)

    monkeypatch.setattr(publish, "write_export", full)
    monkeypatch.setattr(shard_files, "write", lambda *_: full())
    status, said = trained(run)
    (place,) = (tmp_path / "rescue").iterdir()
    assert status == 1
    assert f"; a copy is in {MIRROR}/export" in said
    weights = (place / "export/model.safetensors").read_bytes()
    assert store.get("runs/tiny/export/model.safetensors") == weights
    assert steps_in(store) == []
