"""Events of a run for programs, read from the files that the job writes, and the progress bar of a notebook."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lockstep
from lockstep import api
from lockstep.distributed import job_record
from lockstep.lab import event_stream
from lockstep.lab.event_stream import Event, Following
from support.command import TINY
from support.harness import lockstep_environment


def add(folder: Path, name: str, *lines: dict[str, Any]) -> None:
    with open(folder / f"{name}.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def train_line(step: int, loss: float | None = 1.0) -> dict[str, Any]:
    return {"step": step, "split": "train", "loss": loss}


def kinds(following: Following) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in following.new()]


def test_a_run_from_its_first_to_its_last_event(tmp_path: Path) -> None:
    following = Following(tmp_path)
    assert kinds(following) == []
    job_record.write(tmp_path, job_record.here("local", 2))
    (prepared,) = following.new()
    assert (prepared.kind, prepared.facts) == ("prepared", {"launcher": "local", "processes": 2})
    job_record.note(tmp_path, steps=20)
    add(tmp_path, "events", {"time": 1.0, "event": "start", "step": 0, "hosts": ["a"]})
    (start,) = following.new()
    assert (start.kind, start.steps, start.facts["hosts"]) == ("start", 20, ["a"])
    add(tmp_path, "metrics", train_line(1), train_line(10, None), {"step": 10, "split": "validation", "loss": 2.0})
    add(tmp_path, "samples", {"step": 10, "split": "validation", "samples": [{"text": "x"}]})
    add(
        tmp_path,
        "events",
        {"time": 2.0, "event": "evaluation", "step": 10},
        {"time": 2.0, "event": "checkpoint", "step": 10},
    )
    found = list(following.new())
    assert [(e.kind, e.step, e.split) for e in found] == [
        ("step", 1, "train"),
        ("step", 10, "train"),
        ("evaluation", 10, "validation"),
        ("samples", 10, "validation"),
        ("checkpoint", 10, None),
    ]
    assert found[0].numbers == {"loss": 1.0}
    assert math.isnan(found[1].numbers["loss"]), "JSON has no word for it"
    assert found[3].facts == {"samples": [{"text": "x"}]}
    assert kinds(following) == [], "nothing twice"
    add(tmp_path, "events", {"time": 3.0, "event": "finish", "step": 20, "weights": "ab"})
    assert [(e.kind, e.facts["weights"]) for e in following.new()] == [("finish", "ab")]
    end = following.end("done")
    assert (end.kind, end.steps, end.facts) == ("end", 20, {"status": "done"})


def test_earlier_events_are_skipped_and_repeated_steps_reported_again(tmp_path: Path) -> None:
    """A resume rewrites metrics.jsonl without the lines of repeated steps."""
    add(tmp_path, "events", {"time": 1.0, "event": "start", "step": 0})
    add(tmp_path, "metrics", train_line(1), train_line(10), train_line(20))
    (tmp_path / "events.jsonl").open("a").write('{"half": ')
    following = Following(tmp_path)
    add(tmp_path, "events", {}, {"time": 2.0, "event": "start", "step": 10})
    (tmp_path / "new").write_text("".join(json.dumps(train_line(step)) + "\n" for step in (1, 10, 15)))
    (tmp_path / "new").replace(tmp_path / "metrics.jsonl")
    assert kinds(following) == [("start", 10), ("step", 15)]
    add(tmp_path, "metrics", train_line(20))
    assert kinds(following) == [("step", 20)]
    add(tmp_path, "events", {"time": 3.0, "event": "start", "step": 15})  # a rank died, and the job started again
    (tmp_path / "new").write_text("".join(json.dumps(train_line(step)) + "\n" for step in (1, 10, 15, 20)))
    (tmp_path / "new").replace(tmp_path / "metrics.jsonl")
    assert kinds(following) == [("start", 15), ("step", 20)]


def test_incomplete_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    following = Following(tmp_path)
    text = json.dumps(train_line(5))
    (tmp_path / "metrics.jsonl").write_text(text[:10])
    assert kinds(following) == []
    (tmp_path / "metrics.jsonl").open("a").write(text[10:] + "\n")
    assert kinds(following) == [("step", 5)]


# -- in a notebook ---------------------------------------------------------------------------------------------------


def shown(*events: Event) -> event_stream.Bar:
    bar = event_stream.Bar()
    for event in events:
        bar(event)
    return bar


def test_progress_bar_shows_step_and_metric() -> None:
    assert repr(shown()) == f"[{'.' * 30}] preparing"
    bar = shown(
        Event("start", 0, 200),
        Event("step", 100, 200, "train", {"loss": 0.5}),
        Event("evaluation", 100, 200, "validation", {"loss": 0.75}),
    )
    assert repr(bar) == f"[{'#' * 15}{'.' * 15}] training  100/200  loss 0.5000  best validation loss 0.75 (step 100)"
    assert bar._repr_html_().startswith('<progress value="100" max="200"')
    assert "done" in repr(shown(Event("end", 200, 200, facts={"status": "done"})))


def test_there_is_a_bar_in_a_notebook_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert event_stream.bar() is None
    replaced: list[event_stream.Bar] = []
    handle = SimpleNamespace(update=replaced.append)
    shells: list[tuple[dict[str, Any], bool]] = [({}, False), ({"IPKernelApp": {}}, True)]  # a REPL, a kernel
    for config, there in shells:
        shell = SimpleNamespace(config=config)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        display = SimpleNamespace(display=lambda what, display_id: handle)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        found = event_stream.bar()
        assert (found is not None) is there
    assert found is not None
    found(Event("step", 1, 2, "train", {"loss": 0.5}))
    assert replaced == [found]


# -- a job -----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_job_is_followed_and_stopped(here: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of event occurs once, in order, for a job that its listener stops and then resumes."""
    for name, value in lockstep_environment(cache).items():
        monkeypatch.setenv(name, value)
    changes = {"output": "out", "steps": 12, "launch.processes": 1, "track.every": 4, "evaluate.every": 4}
    run = lockstep.Run.load(TINY, changes | {"checkpoint.every": 4})
    events: list[lockstep.Event] = []

    def stop(event: lockstep.Event) -> None:
        events.append(event)
        if event.kind == "evaluation":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.train(run, None, stop)
    assert [e.kind for e in events[:3]] == ["prepared", "start", "step"]
    assert (events[2].step, events[2].steps) == (1, 12)
    again: list[lockstep.Event] = []
    result = api.train(run, None, again.append)
    assert again[1].step > 0, "it goes on"
    assert [e.kind for e in again][-2:] == ["finish", "end"]
    steps = [e.step for e in (*events, *again) if e.kind == "step"]
    assert sorted(set(steps)) == [1, 4, 8, 12]
    assert dict([e for e in again if e.split == "test"][-1].numbers) == pytest.approx(
        {k: v for k, v in result.metrics["test"].items() if k != "step"}
    )
