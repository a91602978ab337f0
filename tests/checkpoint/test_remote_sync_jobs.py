"""Whole jobs with a mirror: killed during an upload, resumed on another machine, refused at the end."""

import hashlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkpoints import digest
from support.command import LOCKSTEP, STEPS, ended, kill, processes_in, start, train, until, write
from support.store_server import BUCKET, SECRET, Asked, Store, server

__all__ = ["server"]  # fixtures

pytestmark = [pytest.mark.extras, pytest.mark.processes]
MIRROR = f"s3://{BUCKET}/runs/job"
AT = "runs/job/checkpoints"


@pytest.fixture
def store(server: Store) -> Iterator[Store]:
    yield server
    server.clear()


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "out/export/model.safetensors").read_bytes()).hexdigest()


def files_in(folder: Path) -> str:
    return "".join(
        p.read_text(errors="replace") for p in folder.rglob("*") if p.is_file() and p.suffix != ".safetensors"
    )


def test_a_job_killed_during_an_upload_resumes_on_another_machine(
    tmp_path: Path, cache: Path, store: Store, untouched: Path
) -> None:
    """Two ranks save shards; on another machine, with an empty folder, one process resumes."""
    here, there = tmp_path / "here", tmp_path / "there"
    write(here, remote_dir=MIRROR, strategy={"name": "fsdp2", "options": {"gather": "micro_batch"}})
    write(there, remote_dir=MIRROR, strategy="single", launch={"device": "cpu", "threads": 1, "processes": 1})

    def slow_from_the_second_on(asked: Asked) -> None:
        store.slow_s = 5.0 if re.search(r"step-0000[2-9]0/shard", asked.key) else 0.0

    # training does not wait for uploads: the interrupted one is the newest when the first has arrived
    store.fault = slow_from_the_second_on
    job = start([*LOCKSTEP, "train", "run.yaml"], here, cache, **store.environment)
    until(lambda: store.sent(r"step-0000[2-9]0/shard") > 0, "the second upload to begin", job)
    kill(*processes_in(here))
    job.communicate()
    store.fault, store.slow_s = (lambda asked: None), 0.0
    until(lambda: not processes_in(here), "the ranks to end")
    assert [name for name in store.names(AT) if name.endswith("manifest.json")] == [f"{AT}/step-000010/manifest.json"]
    assert sum(name.startswith(f"{AT}/step-000010/shard-") for name in store.names()) == 2
    store.asked.clear()

    status, out, err = train(there, cache, **store.environment)
    assert status == 0, err
    assert f"step-000010 in {MIRROR} was downloaded and verified" in out, out + err
    assert f"resuming after step 10 of {STEPS}" in out
    assert f"checkpoints and export are in {MIRROR}" in out
    assert digest(there / f"out/checkpoints/step-{STEPS:06d}") == digest(
        untouched / f"out/checkpoints/step-{STEPS:06d}"
    )
    assert weights(there) == weights(untouched)
    assert [name for name in store.names(AT) if name.endswith("manifest.json")] == [
        f"{AT}/step-{step:06d}/manifest.json" for step in (STEPS - 10, STEPS)
    ]
    assert hashlib.sha256(store.get("runs/job/export/model.safetensors")).hexdigest() == weights(there)
    assert SECRET not in out + err + files_in(there / "out")

    status, out, err = train(there, cache, **store.environment)
    assert (status, "is finished" in out) == (0, True), err
    assert store.sent(r"export/model\.safetensors") == 1


def test_a_refusing_store_loses_no_training(tmp_path: Path, cache: Path, store: Store) -> None:
    """The run ends with status 1 and everything in its output folder; the same command uploads it once the store
    accepts it."""
    write(tmp_path, remote_dir=MIRROR, steps=20, launch={"device": "cpu", "threads": 1, "processes": 1})
    store.fault = lambda asked: 403 if asked.method == "PUT" and "shard" in asked.key else None
    status, out, err = train(tmp_path, cache, **store.environment)
    assert status == 1
    assert f"remote_dir: {MIRROR} does not have a complete copy of out: s3://{BUCKET} refuses access (403)" in err
    assert (tmp_path / "out/export/model.safetensors").exists()
    store.fault = lambda asked: None
    status, out, err = train(tmp_path, cache, **store.environment)
    assert status == 0, err
    assert f"checkpoints and export are in {MIRROR}" in out
    assert "runs/job/export.json" in store.names()
    assert SECRET not in out + err


def test_a_stop_waits_for_the_upload_and_reports_what_is_missing(tmp_path: Path, cache: Path, store: Store) -> None:
    write(tmp_path, remote_dir=MIRROR)
    store.fault = lambda asked: (
        403 if asked.method == "PUT" and "step-0000" in asked.key and asked.key[-3:] != "son" else None
    )
    job = start([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache, **store.environment)
    until(lambda: store.sent("step-000010/shard") > 0, "the first upload to be refused", job)
    os.kill(job.pid, signal.SIGTERM)
    status, out, err = ended(job)
    assert status == 75, err
    assert f"is not in {MIRROR} (s3://{BUCKET} refuses access (403)" in out
    store.fault = lambda asked: None
    job = start([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache, **store.environment)
    until(lambda: store.sent("manifest.json") > 0, "an upload", job)
    os.kill(job.pid, signal.SIGTERM)
    status, out, err = ended(job)
    assert status == 75, err
    assert "is not in" not in out
    newest = max((tmp_path / "out/checkpoints").glob("step-*")).name
    assert f"{AT}/{newest}/manifest.json" in store.names()


def test_plan_refuses_an_unwritable_store(tmp_path: Path, cache: Path, store: Store) -> None:
    write(tmp_path, remote_dir="s3://no-such-bucket/runs/job")
    for command in ("plan", "train"):
        job = start([*LOCKSTEP, command, "run.yaml"], tmp_path, cache, **store.environment)
        status, _, err = ended(job)
        assert (status, err.strip()) == (
            2,
            "lockstep: remote_dir: the bucket no-such-bucket does not exist; create it, or correct the address "
            "[LS2144]",
        )
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
