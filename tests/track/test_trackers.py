"""Values logged to each tracker are read back from its own store; the keys of trackers; system metrics of ranks."""

import json
import os
import signal
import sqlite3
import sys
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.checkpoint.manifest import read_manifest
from lockstep.config import plugins
from lockstep.config.run import RunError
from lockstep.data.job import Job, arithmetic_of
from lockstep.distributed.system_metrics import SystemMetrics
from lockstep.distributed.world import World
from lockstep.track import tracker as interface
from lockstep.track.tracker import Trackers
from lockstep.track.wandb_file import records
from lockstep.training.train_job import RankZeroSinks
from support.command import LOCKSTEP, STEPS, bits, ended, lines, ranks_of, start, train, until, write
from support.documents import chapters
from support.harness import run_on, tiny
from support.messages import raises
from support.places import TESTS_PATH
from support.tracked import numbers, there

ALL = ["tensorboard", "wandb", "mlflow", "trackio"]
Values = dict[str, dict[int, list[float]]]  # name -> step -> what was logged for it, as often as it was


def sample(step: int) -> list[dict[str, str]]:
    return [{"text": f"text {step}", "predicted": "joy", "label": "fear"}]


# -- reading back ----------------------------------------------------------------------------------------------------


def logged(world: World, name: str, folder: Path) -> tuple[dict[str, str], list[str], list[str]]:
    """A run that is stopped after four steps and goes on from a checkpoint of the second. In a process of its own."""
    os.environ.update(TRACKIO_DIR=str(folder / "trackio"), WANDB_MODE="offline")
    os.environ.pop("WANDB_API_KEY", None)
    options = ["track.wandb={project: names, group: seeds, tags: [a, b]}", "track.mlflow.experiment=names"]
    options += ["track.trackio.project=names", "track.close_timeout_s=250"]
    run = tiny(f"output={folder / 'out'}", f"track.to=[{name}]", *options)
    run.folder.mkdir(exist_ok=True)
    ids: dict[str, str] = {}
    said: list[str] = []
    warned: list[str] = []
    for after, last in ((0, 4), (2, 6)):
        trackers = Trackers(run, after, ids, said.append, warned.append)
        for step in range(after + 1, last + 1):
            trackers.log(step, "train", numbers(step))
            if step % 2 == 0:
                trackers.log(step, "validation", {"accuracy": step / 10})
                trackers.show(step, sample(step))
            trackers.log(step, "system", {"memory_gb/rank0": 1.5, "memory_gb/rank1": 2.5})
        trackers.close("stopped" if last == 4 else "done")
    return ids, said, warned


def in_tensorboard(folder: Path) -> tuple[Values, list[str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "out" / "tensorboard"))
    events.Reload()
    found: Values = defaultdict(lambda: defaultdict(list))
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found[name][event.step].append(event.value)
    texts = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("eval/sample_0/text_summary")]
    return found, texts


def in_wandb(folder: Path) -> tuple[Values, list[str]]:
    found: Values = defaultdict(lambda: defaultdict(list))
    texts = {}
    for path in sorted((folder / "out" / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in records(path):
            if record.WhichOneof("record_type") == "history":
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                for name in row:
                    if (
                        not name.startswith(("_", "eval/samples")) and row["_step"] not in found[name]
                    ):  # the server takes each step once
                        found[name][row["_step"]].append(row[name])
    for path in sorted((folder / "out" / "wandb").glob("offline-run-*/files/media/table/eval/*.json")):
        table = json.loads(path.read_text())
        assert table["columns"] == ["step", "text", "predicted", "label"]
        texts.update({step: f"{text} {guess} {label}" for step, text, guess, label in table["data"]})
    return found, list(texts.values())


def in_mlflow(folder: Path) -> tuple[Values, list[str]]:
    found: Values = defaultdict(lambda: defaultdict(list))
    with sqlite3.connect(folder / "out" / "mlflow.db") as store:
        for name, step, value in store.execute("select key, step, value from metrics"):
            found[name][step].append(value)
        assert store.execute("select status from runs").fetchall() == [("FINISHED",)]
        parameters = dict(store.execute("select key, value from params"))
    assert parameters["optim.learning_rate"] == "0.005"
    assert parameters["track.mlflow.experiment"] == "names"
    files = sorted((folder / "out" / "mlflow").glob("*/artifacts/samples/step-*.json"))
    tables = [json.loads(path.read_text()) for path in files]
    assert all(table["columns"] == ["step", "text", "predicted", "label"] for table in tables)
    return found, [" ".join(row[1:]) for table in tables for row in table["data"]]


def in_trackio(folder: Path) -> tuple[Values, list[str]]:
    found: Values = defaultdict(lambda: defaultdict(list))
    texts: list[str] = []
    with sqlite3.connect(folder / "trackio" / "names.db") as store:
        assert len(store.execute("select distinct run_name from metrics").fetchall()) == 1
        for step, row in store.execute("select step, metrics from metrics order by id"):
            for name, value in json.loads(row).items():
                if name == "eval/samples":
                    texts = [f"{r['text']} {r['predicted']} {r['label']}" for r in value["_value"]] + texts
                elif step not in found[name]:  # the last step before a kill may be there twice
                    found[name][step].append(value)
    return found, texts


READ = {"tensorboard": in_tensorboard, "wandb": in_wandb, "mlflow": in_mlflow, "trackio": in_trackio}


@pytest.mark.processes
@pytest.mark.parametrize("name", ALL)
def test_logged_numbers_are_in_the_trackers_store(name: str, tmp_path: Path) -> None:
    there(name)
    ((ids, said, warned),) = run_on(1, logged, name, tmp_path)
    assert warned == []
    assert len(said) == 2
    assert all(line.startswith(f"{name}: ") for line in said)
    found, texts = READ[name](tmp_path)
    wanted = {f"train/{key}": {s: [numbers(s)[key]] for s in range(1, 7)} for key in numbers(1)}
    wanted |= {"eval/accuracy": {s: [s / 10] for s in (2, 4, 6)}}
    wanted |= {f"system/memory_gb/rank{r}": {s: [1.5 + r] for s in range(1, 7)} for r in (0, 1)}
    assert found.keys() == wanted.keys()
    for key, steps in wanted.items():
        assert found[key].keys() == steps.keys(), key
        assert all(found[key][step] == pytest.approx(values) for step, values in steps.items()), key
    for step in (2, 4, 6):
        assert any(all(word in text for word in (f"text {step}", "joy", "fear")) for text in texts), texts
    assert ids.keys() == ({name} if name != "tensorboard" else set())
    if name in ids:
        assert all(ids[name] in line for line in said), "both processes name the same run"


def test_mlflow_gets_no_name_that_it_refuses() -> None:
    """MLflow refuses a whole request for one name with other characters, and the run would have no metrics there."""
    there("mlflow")
    from mlflow.utils.validation import _validate_batch_log_data

    run = tiny("track.to=[mlflow]", "model.adapter={type: lora, rank_pattern: {'^.*q$': 4, '^.+q$': 8}}")
    kind: Any = plugins.find("track", "mlflow")
    asked: list[Any] = []

    def log_batch(run_id: str, metrics: Any = (), params: Any = ()) -> None:
        _validate_batch_log_data(metrics, params, ())
        asked.extend((row.key, row.value) for row in (*metrics, *params))

    tracker = kind(run, kind.Options(), 0, "number")
    tracker._client = SimpleNamespace(log_batch=log_batch)
    tracker._parameters()
    name = "model.adapter.rank_pattern._._q_"
    assert sorted(value for key, value in dict(asked).items() if key.startswith(name)) == ["4", "8"]
    asked.clear()
    odd = ["f1 (de)", "f1 [de]", "f1 _de_", "a//b", "a__b", "m" * 300, "m" * 301]
    tracker.log(1, "train", {"loss": 1.0, **{name: i for i, name in enumerate(odd)}})
    rows = dict(asked)
    assert len(rows) == len(asked) == 1 + len(odd)  # no two names became one
    assert rows["train/loss"] == 1
    assert rows["train/f1 _de_"] == 2
    assert all(any(key.startswith(start) for key in rows) for start in ("train/f1 _de__", "train_a__b_"))


def test_mlflow_finds_the_run_of_a_checkpoint_that_is_older_than_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint of a run that is stopped while MLflow connects holds a token, which is a tag of the MLflow
    run."""
    runs: list[Any] = []

    def create_run(_: str, run_name: str, tags: dict[str, str]) -> Any:
        runs.append(SimpleNamespace(info=SimpleNamespace(run_id=f"{len(runs):032x}"), tags=tags))
        return runs[-1]

    def search_runs(numbers: list[str], words: str, **_: Any) -> list[Any]:
        return [each for each in runs if words == f"tags.`lockstep.run` = '{each.tags['lockstep.run']}'"]

    ones = {"create_run": create_run, "search_runs": search_runs, "update_run": lambda *_, **__: None}
    ones["get_experiment_by_name"] = lambda _: SimpleNamespace(experiment_id="1")
    (tmp_path / "mlflow.db").touch()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda _: SimpleNamespace(**ones)))
    kind: Any = plugins.find("track", "mlflow")
    monkeypatch.setattr(kind, "_parameters", lambda _: None)

    def opened(run_id: str | None, after: int) -> tuple[str, str]:
        tracker = kind(tiny(f"output={tmp_path}"), kind.Options(tags={"a": "b"}), after, run_id)
        early = tracker.run_id
        tracker.open()
        return early, tracker.run_id

    token, first = opened(None, 0)
    assert opened(token, 1)[1] == opened(first, 2)[1] == first != token
    other, second = opened(f"{token}0", 1)  # stopped before there was a run: a new one
    assert second != first
    assert opened(other, 2)[1] == second
    assert [run.tags["a"] for run in runs] == ["b", "b"]


@pytest.mark.parametrize("name", ["mlflow", "wandb", "trackio"])
def test_a_checkpoint_holds_the_id_before_the_tracker_is_connected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped meanwhile resumes in the same tracker run."""
    run, connected, opened = tiny(f"output={tmp_path}", f"track.to=[{name}]"), threading.Event(), []

    def connect(self: Any) -> str:
        opened.append(self.run_id)
        assert connected.wait(60)
        return ""

    kind: Any = plugins.find("track", name)
    monkeypatch.setattr(kind, "open", connect)
    for method in ("log", "close"):
        monkeypatch.setattr(kind, method, lambda *_: None)
    ids: dict[str, str] = {}
    for after in (0, 1):
        connected.clear()
        trackers = Trackers(run, after, ids, print, print)
        held = dict(ids)
        connected.set()
        trackers.close("stopped")
        assert held == ids == {name: opened[0]}
    assert opened == [ids[name]] * 2


def test_a_run_without_a_checkpoint_continues_the_same_tracker_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start with other keys, data or code, or after the end, is a new tracker run."""
    names, opened = ["mlflow", "wandb", "trackio"], list[dict[str, str]]()
    for name in names:
        kind: Any = plugins.find("track", name)
        monkeypatch.setattr(kind, "open", lambda self: opened[-1].setdefault(type(self).__name__.lower(), self.run_id))
        for method in ("log", "show", "close"):
            monkeypatch.setattr(kind, method, lambda *_: None)
    clock = iter(range(100))
    monkeypatch.setattr("lockstep.track.trackio.time", SimpleNamespace(strftime=lambda _: str(next(clock))))
    monkeypatch.setattr("lockstep.training.train_job.SystemMetrics", lambda _: None)
    console, world = SimpleNamespace(tracker=print, note=print), SimpleNamespace(is_main=True)

    def begin(*keys: str, data: str = "data", code: str = "", step: int = 0, end: Any = "failed") -> dict[str, str]:
        run = tiny(f"output={tmp_path}", f"track.to=[{','.join(names)}]", *keys)
        checkpoints = SimpleNamespace(trackers={}, code={"mine.py": code})  # read anew by each process
        prepared: Any = SimpleNamespace(key=data)
        job = replace(Job.of(run), prepared=prepared)
        session: Any = SimpleNamespace(run=run, job=job, world=world, checkpoints=checkpoints)
        opened.append({})
        RankZeroSinks(session, console, step).close(end)  # type: ignore[arg-type]
        assert opened[-1].keys() == {*names}
        return opened[-1]

    first = begin()
    assert begin("track.every=1") == first
    others = [begin("seed=5"), begin(data="other"), begin(code="other")]
    known = [*first.values()]
    for other in [*others, begin(step=1), begin()]:  # a checkpoint has its own
        assert not {*known} & {*other.values()}
        known += other.values()
    (tmp_path / "trackers.json").write_text("[")
    assert not {*known} & {*begin(end="done").values()}
    assert not (tmp_path / "trackers.json").exists()


@pytest.mark.processes
def test_wandb_gets_all_numbers_and_the_run_as_its_config(tmp_path: Path) -> None:
    there("wandb")
    ((ids, said, _),) = run_on(1, logged, "wandb", tmp_path)
    paths = sorted((tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(paths) == 2
    synced = [line.partition("send it with: ")[2] for line in said]
    assert synced == [f"wandb sync {paths[0].parent}", " && ".join(f"wandb sync {path.parent}" for path in paths)]
    for path in paths:
        (run,) = [r.run for r in records(path) if r.WhichOneof("record_type") == "run"]
        assert (run.run_id, run.project, run.run_group, list(run.tags)) == (ids["wandb"], "names", "seeds", ["a", "b"])
        assert run.display_name == "tiny"
        config = {update.key: json.loads(update.value_json) for update in run.config.update}
        assert config["optim"]["learning_rate"] == 5e-3
        assert config["seed"] == 0
        kinds = {record.WhichOneof("record_type") for record in records(path)}
        assert "stats" not in kinds, "W&B's own system metrics are of one process only"
    assert not list((tmp_path / "out" / "wandb").rglob("*.patch")), "no diff of the working tree is kept"


@pytest.mark.processes
def test_a_killed_job_continues_the_same_tracker_runs_with_the_same_bits(
    tmp_path: Path, cache: Path, untouched: Path
) -> None:
    for name in ALL:
        there(name)
    own = {"project": "names"}
    track = {"to": ALL, "every": 1, "wandb": {**own, "mode": "offline"}, "trackio": own, "close_timeout_s": 250}
    write(tmp_path, track=track)
    hold = tmp_path / "hold"  # no step from 5 on before all trackers are open, none from 35 on at all
    hold.write_text("5")
    variables = {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": TESTS_PATH}
    process = start(
        [*LOCKSTEP, "train", "run.yaml", "strategy.name=support.waiting_at_steps.Held"], tmp_path, cache, **variables
    )

    def opened() -> bool:
        log = tmp_path / "out" / "log.txt"
        return log.exists() and all(f"{name}: " in log.read_text() for name in ALL)

    def known() -> bool:
        """Return whether MLflow has every step of the checkpoint: a kill loses what is still in a tracker's thread."""
        found = read_manifest((tmp_path / "out" / "checkpoints" / "latest").resolve())
        if isinstance(found, str) or found.trackers.keys() != {"wandb", "mlflow", "trackio"}:
            return False
        there, steps = in_mlflow_of(tmp_path)[0], set(range(1, found.step + 1))
        return all(steps <= there[name].keys() for name in ("train/loss", "system/memory_gb/rank1"))

    until(opened, "all trackers", process)
    hold.write_text("35")
    until(known, "a checkpoint that knows all runs", process)
    os.kill(ranks_of(process, tmp_path)[0], signal.SIGKILL)
    status, out, err = ended(process)
    assert status == 1, (out, err)
    before = read_manifest((tmp_path / "out" / "checkpoints" / "latest").resolve())
    assert not isinstance(before, str)
    hold.unlink()
    status, out, err = train(tmp_path, cache, "strategy.name=support.waiting_at_steps.Held", **variables)
    assert status == 0, err
    assert f"resuming after step {before.step}" in out
    after = read_manifest(tmp_path / "out" / "checkpoints" / f"step-{STEPS:06d}")
    assert not isinstance(after, str)
    assert after.trackers == before.trackers
    assert bits(tmp_path) == bits(untouched), "trackers change nothing"
    found, _ = in_mlflow_of(tmp_path)
    assert found["train/loss"].keys() == set(range(1, STEPS + 1))
    assert all(len(values) == 1 for values in found["train/loss"].values())
    kept = {line["step"]: line["loss"] for line in lines(untouched) if line["split"] == "train"}
    assert {step: value for step, (value,) in found["train/loss"].items()} == kept
    assert found["system/memory_gb/rank1"].keys() == set(range(1, STEPS + 1))
    assert {
        r.run.run_id for p in (tmp_path / "out" / "wandb").rglob("*.wandb") for r in records(p) if r.run.run_id
    } == {after.trackers["wandb"]}


def in_mlflow_of(folder: Path) -> tuple[Values, int]:
    found: Values = defaultdict(lambda: defaultdict(list))
    with sqlite3.connect(folder / "out" / "mlflow.db") as store:
        for name, step, value in store.execute("select key, step, value from metrics"):
            found[name][step].append(value)
        (runs,) = store.execute("select count(*) from runs").fetchone()
    return found, runs


# -- the run file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("track.wandb.projct=x", ["track.wandb.projct", "'project'"]),
        ("track.wandb.mode=onlin", ["track.wandb.mode", "'onlin'", "'online'"]),
        ("track.wandb=x", ["track.wandb", "'x'", "mapping"]),
        ("track.wand.project=x", ["track.wand", "'wandb'"]),
        ("track.evry=3", ["track.evry", "'every'"]),
        ("track.console=loud", ["track.console", "'loud'", "'verbose'"]),
        ("track.to=[wanb]", ["track.to", "'wanb'", "wandb"]),
        ("track.wandb.api_key=0123456789", ["track.wandb.api_key", "secret"]),
    ],
)
def test_keys_of_trackers_are_checked(override: str, words: list[str]) -> None:
    with pytest.raises(RunError) as caught:
        tiny(override)
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_resolved_run_has_every_key_of_the_trackers_it_names() -> None:
    run = tiny("track.to=[wandb]", "track.mlflow.experiment=names")
    assert run.track.options["wandb"]["project"] == "lockstep"
    assert run.track.options["mlflow"]["experiment"] == "names"
    assert "trackio" not in run.track.options
    assert "track.wandb.project" not in arithmetic_of(run)


@pytest.mark.parametrize("name", ALL)
def test_every_key_of_every_tracker_is_documented(name: str) -> None:
    text = chapters("how-to/trackers.md")
    section = text.partition(f"## `{name}`")[2].partition("\n## ")[0]
    fields: dict[str, Any] = plugins.find("track", name).Options.model_fields  # type: ignore[attr-defined]
    rows = [f"| `track.{name}.{key}` |" for key in fields] + [str(field.description) for field in fields.values()]
    assert [row for row in rows if row not in section] == []
    assert f"lockstep-train[{name}]" in section


def test_a_tracker_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(interface.Tracker):
        packages = ("left_here_by_a_tracker",)

        def open(self) -> str:
            return ""

        def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
            pass

    (tmp_path / "left_here_by_a_tracker").mkdir()  # as W&B leaves `wandb`: a folder is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with raises("LS0500", "left_here_by_a_tracker"):
        Missing.check()


# -- what ranks take of their machines -------------------------------------------------------------------------------


def measured(world: World) -> list[tuple[int, dict[str, float]] | None]:
    usage = SystemMetrics(world)
    found = [usage.take()]
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    usage.ask(7)
    found.append(usage.take())
    found.append(usage.take())
    return found


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_system_metrics_of_all_ranks_are_logged(ranks: int) -> None:
    first, *others = run_on(ranks, measured)
    assert first[0] is None
    assert first[2] is None
    step, values = first[1]
    assert step == 7
    assert values.keys() == {f"{name}/rank{rank}" for name in ("cpu_percent", "memory_gb") for rank in range(ranks)}
    assert all(0.05 < values[f"memory_gb/rank{rank}"] < 50 for rank in range(ranks))
    assert all(values[f"cpu_percent/rank{rank}"] > 0 for rank in range(ranks))
    assert all(other == first for other in others)
