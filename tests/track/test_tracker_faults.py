"""Failing trackers, a missing network or key, a full disk: reported once, and training goes on."""

import json
import math
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from lockstep.distributed.world import World
from lockstep.track.tracker import Tracker, Trackers, _Lane
from lockstep.track.wandb_file import records
from support.command import CommandJob
from support.harness import run_on, tiny
from support.places import ROOT
from support.tracked import numbers, there

FAILING = """
import sys
import time

from lockstep.track.tracker import Tracker


class Broken(Tracker):
    def open(self):
        self.fail("open")
        return ""

    def log(self, step, split, numbers):
        self.fail("log")

    def show(self, step, samples):
        self.fail("show")

    def close(self, end):
        self.fail("close")

    def fail(self, where):
        pass
"""
HOW = {
    "open": "if where == 'open': raise ConnectionError('no such host')",
    "log": "if where == 'log': raise OSError(28, 'No space left on device')",
    "close": "if where == 'close': raise RuntimeError('500 Internal Server Error')",
    "exit": "if where == 'log': sys.exit('your trial has ended')",
    "hang": "time.sleep(100_000)",
}


@pytest.mark.processes
@pytest.mark.parametrize("how", HOW)
def test_a_failed_tracker_is_named_once_and_training_continues(how: str, tmp_path: Path, job: CommandJob) -> None:
    (tmp_path / "mine.py").write_text(FAILING.replace("        pass\n", f"        {HOW[how]}\n"))
    track = {"to": ["mine.Broken", "tensorboard"], "every": 1, "close_timeout_s": 1}
    job.write(track=track, steps=8, evaluate={"every": 4}, launch={"device": "cpu", "threads": 1, "processes": 1})
    out = job.finish()
    notes = re.findall(r"^note: mine\.Broken .*", out, re.MULTILINE)
    assert len(notes) == 1, out
    wanted = {"open": "no such host", "log": "No space left", "close": "500", "exit": "trial", "hang": "still sending"}
    assert wanted[how] in notes[0]
    assert [line["step"] for line in job.lines() if line["split"] == "train"] == list(range(1, 9))
    assert list((tmp_path / "out" / "tensorboard").iterdir()), "the others go on"


def online(world: World, folder: Path, key: str | None) -> tuple[list[str], list[str]]:
    """Log to an online W&B run whose server cannot be reached; return its lines and warnings."""
    os.environ.update(HOME=str(folder), NETRC=str(folder / "netrc"), WANDB_MODE="online")
    os.environ["WANDB_BASE_URL"] = "http://127.0.0.1:9"
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        os.environ.pop(name, None)
    if key is not None:
        os.environ["WANDB_API_KEY"] = key
    from lockstep.track import wandb

    wandb.SECONDS_TO_CONNECT = 3.0
    run = tiny(f"output={folder / 'out'}", "track.to=[wandb]", "track.close_timeout_s=250")
    run.folder.mkdir()
    said: list[str] = []
    warned: list[str] = []
    trackers = Trackers(run, 0, {}, said.append, warned.append)
    trackers.log(1, "train", numbers(1))
    trackers.close("done")
    return said, warned


@pytest.mark.processes
@pytest.mark.parametrize(("key", "reason"), [(None, "WANDB_API_KEY"), ("0" * 40, "connection refused")])
def test_wandb_without_a_key_or_a_network_keeps_the_run_for_later(
    key: str | None, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    there("wandb")
    ((said, warned),) = run_on(1, online, tmp_path, key)
    assert warned == []
    assert reason in said[0]
    assert "0" * 40 not in said[0]
    assert "wandb" not in "".join(capfd.readouterr()), "the terminal is the console's"
    (folder,) = re.findall(r"wandb sync (\S+)", said[0])
    (path,) = Path(folder).glob("run-*.wandb")
    assert [r for r in records(path) if r.WhichOneof("record_type") == "history"]


def test_a_full_disk_costs_metrics_nothing(tmp_path: Path) -> None:
    warned: list[str] = []
    run = tiny(f"output={tmp_path}")
    trackers = Trackers(run, 0, {}, warned.append, warned.append)
    trackers.log(1, "train", numbers(1))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))  # bytes: a part of the next line fits
    try:
        for step in (2, 3):
            trackers.log(step, "train", numbers(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert len(warned) == 1
    assert (tmp_path / "metrics.jsonl").stat().st_size == size + 10
    trackers.log(4, "train", numbers(4))
    trackers.close("done")
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found == [{"step": step, "split": "train", **numbers(step)} for step in range(1, 5)]


def test_nonfinite_numbers_are_null_in_json(tmp_path: Path) -> None:
    trackers = Trackers(tiny(f"output={tmp_path}"), 0, {}, print, print)
    trackers.log(1, "train", {"loss": math.nan, "grad_norm": math.inf})
    trackers.close("done")
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "split": "train", "loss": None, "grad_norm": None}


def test_events_held_back_are_not_written_through_a_link_put_there_since(tmp_path: Path) -> None:
    """Events logged before the link are flushed to the file that was open."""
    from lockstep.track.tensorboard import TensorBoard

    (theirs := tmp_path / "theirs").mkdir()
    tracker = TensorBoard(tiny(f"output={tmp_path / 'out'}"), None, 0, None)
    tracker.open()
    tracker.log(1, "train", numbers(1))
    (tmp_path / "out/tensorboard").rename(tmp_path / "moved")
    (tmp_path / "out/tensorboard").symlink_to(theirs)
    tracker.show(1, [{"text": "a sample"}])
    tracker.close("done")
    assert list(theirs.iterdir()) == []
    (file,) = (tmp_path / "moved").iterdir()
    assert b"a sample" in file.read_bytes()


def test_trackers_create_no_file_through_a_planted_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker opens in a separate thread, for which training does not wait."""
    from lockstep.track.mlflow import MLflow
    from lockstep.track.tensorboard import TensorBoard
    from lockstep.track.wandb import WandB

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for folder in ("theirs", "out"):
        (tmp_path / folder).mkdir()
    for kind in (TensorBoard, WandB, MLflow):
        tracker = kind(tiny(f"output={tmp_path / 'out'}"), kind.Options(), 0, None)
        (tmp_path / "out" / kind.packages[0]).symlink_to(tmp_path / "theirs")
        for use in (tracker.open, lambda each=tracker: each.log(1, "train", {})):
            with pytest.raises(OSError, match=f"{kind.packages[0]} was replaced by a link"):
                use()
    assert list((tmp_path / "theirs").iterdir()) == []

    theirs = tmp_path / "theirs/keep"
    theirs.touch()
    for kind in (TensorBoard, WandB):  # the next start finds the link: of this run, nothing is behind it
        resumed = kind(tiny(f"output={tmp_path / 'out'}"), kind.Options(), 3, "id4")
        with pytest.raises(OSError, match=f"{kind.packages[0]} is a link to .*, which has nothing of this run"):
            resumed.open()
    assert list((tmp_path / "theirs").iterdir()) == [theirs]


def test_points_lost_in_a_kill_are_logged_again(tmp_path: Path) -> None:
    """W&B's file of an offline run lacks the last steps before a kill; metrics.jsonl has them."""

    class Sink(Tracker):
        plugin = "track"

        def open(self) -> str:
            self.stored, self.lines = 1, list[tuple[int, str, dict[str, float]]]()
            return ""

        def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
            self.lines.append((step, split, numbers))

    lines = [{"step": step, "split": "train", "loss": float(step), "text": "x"} for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sink = Sink(tiny(f"output={tmp_path}"), None, 3, None)
    lane = _Lane("sink", sink, {}, print, print)
    lane.put("log", 4, "train", {"loss": 4.0})
    lane.put("close", "done")
    lane.finish(time.monotonic() + 10)
    assert sink.lines == [(step, "train", {"loss": float(step)}) for step in (2, 3, 4)]


def test_only_one_rank_writes(tmp_path: Path) -> None:
    trackers = Trackers(tiny(f"output={tmp_path}", "track.to=[tensorboard]"), 0, {}, print, print, loud=False)
    trackers.log(1, "train", numbers(1))
    trackers.close("done")
    assert list(tmp_path.iterdir()) == []


def test_the_tracker_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_table.py").write_text((ROOT / "examples/plug_ins/table.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    run = tiny(f"output={tmp_path}", track={"to": ["mine_table.Table"], "mine_table.Table": {"precision": 3}})
    for after, last in ((0, 3), (2, 4)):
        trackers = Trackers(run, after, {}, print, print)
        for step in range(after + 1, last + 1):
            trackers.log(step, "train", {"loss": 1 / step})
        trackers.close("done")
    rows = (tmp_path / "metrics.csv").read_text().split()
    assert rows == ["1,train/loss,1", "2,train/loss,0.5", "3,train/loss,0.333", "4,train/loss,0.25"]
