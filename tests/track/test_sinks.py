"""Secrets and control characters are put into each place where text leaves a run, and must not come out."""

import html
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lockstep import api
from lockstep.checkpoint import export
from lockstep.config.run import Run, load, write_run_yaml
from lockstep.distributed.lost_contact import tell_failure
from lockstep.distributed.world import World
from lockstep.lab.sweep import sweep_file
from lockstep.lab.sweep.sweep import Leaderboard
from lockstep.tasks.classification import Classification
from lockstep.track import console
from lockstep.track.report.report import write_report
from lockstep.track.tracker import Tracker, Trackers, reason
from support.command import CommandJob
from support.harness import TINY, run_on, tiny
from support.messages import raises

TOKEN = "glpat-" + "a" * 22
WORDS = """tr0ub & "dour" 'n 3"""  # a password that HTML, YAML and addresses write in another way
TOLD = f"\x1b]0;owned\x07 \x9b2J \u202e \ud800 {TOKEN} http://me:hunter2@host/ {WORDS}"
KEPT: list[Any] = []


class Fake(Tracker):
    """Record the arguments of calls."""

    def open(self) -> str:
        KEPT.append(self.config)
        return f"see http://me:hunter2@host/ {WORDS}"

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        KEPT.append(numbers)

    def show(self, step: int, samples: Any) -> None:
        KEPT.append(samples)
        raise ConnectionError("x" * 270 + f" http://me:hunter2{'x' * 40}@host/")


def clean(text: str) -> None:
    """Nothing of TOLD but its words is there."""
    for bad in (TOKEN, "hunter2", WORDS, "\x1b", "\x07", "\x9b", "\u202e", "\ud800"):
        assert bad not in text, (bad, text)


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", WORDS)


def test_trackers_and_the_files_beside_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    KEPT.clear()
    run = tiny(f"output={tmp_path}", "track.to=[test_sinks.Fake, tensorboard]")
    # a value of the environment that is a word, too, is allowed in a run file, and struck out where it is sent
    run = run.model_copy(update={"hub": run.hub.model_copy(update={"tags": [WORDS]})})
    speaker = console.Console(True, tmp_path / "log.txt")
    trackers = Trackers(run, 0, {}, speaker.tracker, speaker.note)
    trackers.log(1, "train", {f"f1 of {TOLD}": 1.0, "loss": 2.0})
    trackers.show(1, [{"text": TOLD, TOLD: "joy"}])
    trackers.close("done")
    config, numbers, samples = KEPT
    assert config["hub"]["tags"] == ["***"]
    assert config["optim"]["learning_rate"] == 5e-3
    assert numbers["loss"] == 2.0
    assert samples[0]["text"].startswith("\\x1b]0;owned\\x07 \\x9b2J \\u202e \\ud800 *** http://***@host/ ***")
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"owned" in events
    files = [(tmp_path / name).read_bytes() for name in ("log.txt", "samples.jsonl", "metrics.jsonl")]
    shown = "".join(capsys.readouterr())
    assert "test_sinks.Fake failed: ConnectionError" in shown
    clean(f"{KEPT}{shown}{b''.join(files).decode()}")
    for bad in (TOKEN, "hunter2", WORDS, "\x1b]0;", "\u202e"):
        assert bad.encode() not in events


def test_secrets_are_redacted_before_truncation() -> None:
    for length in range(200, 320):
        caught = ConnectionError("x" * length + " http://me:hunter2hunter2@host/")
        assert "hunter" not in reason(caught)


def connected(world: World, name: str, folder: Path) -> tuple[str, str]:
    """Return a tracker whose address, with a password, comes from the environment."""
    import os

    os.environ.update(HOME=str(folder), WANDB_MODE="online", WANDB_API_KEY="0" * 40)
    os.environ.update(MLFLOW_HTTP_REQUEST_MAX_RETRIES="0", MLFLOW_TRACKING_URI="http://me:hunter2word@127.0.0.1:9")
    os.environ["WANDB_BASE_URL"] = os.environ["MLFLOW_TRACKING_URI"]
    from lockstep.track import wandb

    wandb.SECONDS_TO_CONNECT = 3.0
    run = tiny(f"output={folder / 'out'}", f"track.to=[{name}]", "track.close_timeout_s=250")
    run.folder.mkdir()
    said: list[str] = []
    speaker = console.Console(True, run.folder / "log.txt")

    def heard(text: str) -> None:
        said.append(text)
        speaker.note(text)

    trackers = Trackers(run, 0, {}, heard, heard)
    trackers.log(1, "train", {"loss": 1.0})
    trackers.close("done")
    return "\n".join(said), (run.folder / "log.txt").read_text()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_password_in_a_tracking_address(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(name)
    ((said, log),) = run_on(1, connected, name, tmp_path)
    assert name in said
    assert name in log
    assert "hunter2" not in log + "".join(capfd.readouterr())


def test_the_page_about_a_stranger_s_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "a", "data": {"source": TOLD}, "notes": [WORDS]}))
    line = {"step": 1, "split": "validation", "samples": [{"text": TOLD}]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(line) + "\n")
    event = {"time": 1.0, "event": "start", "step": 0, "opening": {"data": TOLD}, "hosts": [TOLD]}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    table = {"labels": [TOLD, "b"], "counts": [[1, 2], [3, 4]]}
    (tmp_path / "tables.json").write_text(json.dumps({"test": {"confusion": table}}))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count("owned") >= 4
    clean(page)
    clean(html.unescape(page))


def test_a_model_card_stays_yaml_when_a_password_is_a_word_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "lockstep")
    run = tiny("hub.tags=[lockstep]", 'model.config.own="a\\u202eb"')
    facts = {"source": "builtin/emotion", "labels": [TOLD, "<b>"]}
    task: Any = Classification.__new__(Classification)
    task.run, task.prepared = run, SimpleNamespace(facts=facts)
    task.options, task.splits = Classification.Options(), {"train": range(run.batch_size - 1)}
    text = export.model_card(task, {"test": {"accuracy": 0.5, "examples": 4.0}}, 6)
    assert f" for 6 steps of {run.batch_size - 1} examples in " in text, "a batch has no more rows than there are"
    export.check_card(text, Path("README.md"))
    clean(text)
    head, block = yaml.safe_load(text.split("---")[1]), text.split("```yaml\n")[1].split("```")[0]
    assert head["tags"] == ["***", "text-classification"]
    assert yaml.safe_load(block)["hub"]["tags"] == ["***"]


def test_tracebacks_of_uncaught_errors_are_redacted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    console.strike_tracebacks()

    def fail() -> None:
        raise ConnectionError(TOLD)

    try:
        fail()
    except ConnectionError as caught:
        sys.excepthook(type(caught), caught, caught.__traceback__)
        tell_failure(caught, None, tmp_path / "log.txt")
    thread = threading.Thread(target=fail, name="sender")
    thread.start()
    thread.join()
    shown = "".join(capsys.readouterr())
    assert shown.count("ConnectionError: \\x1b]0;owned") == 3
    assert "in thread sender" in shown
    clean(shown + (tmp_path / "log.txt").read_text())


OPTIONS = [
    f"model.config={{a: !!set {{{TOKEN}}}}}",
    "model.config={a: !!binary Z2xwYXQtYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFh}",
    f"model.config={{{TOKEN}: 1}}",
    "model.config={password: 12345678}",
    "model.config={a: [{b: {api-key: hunter2}}]}",
    "launch={name: slurm, extra: [--password, hunter2]}",
    "launch={name: slurm, extra: ['--export=DB_PASSWORD=hunter2']}",
    "launch={name: slurm, setup: [export WANDB_API_KEY=hunter2]}",
    "launch={name: sagemaker, extra: {Environment: {DB_PASSWORD: hunter2}}}",
    "launch={name: kubernetes, environment: [DB_PASSWORD=hunter2]}",
    f"launch={{name: kubernetes, secrets: [HF_TOKEN={TOKEN}]}}",
    f"track.wandb.notes={'0123456789abcdef' * 2}",
]


@pytest.mark.parametrize("option", OPTIONS)
def test_no_way_into_run_yaml_by_options(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2)
    with raises("LS1118") as caught:
        tiny(f"output={tmp_path / 'out'}", option)
    assert "hunter2" not in str(caught.value)
    assert TOKEN not in console.printable(str(caught.value))


def test_no_way_into_run_yaml_by_python(tmp_path: Path) -> None:
    source = {"data": {"source": "http://me:hunter2@host/x.csv"}}
    with raises("LS1118", "data.source"):
        Run.load(TINY | source)
    with raises("LS1118"):
        Run.load(TINY, {"model.config": {"deep": [(TOKEN,)]}})
    whole = Run.model_validate(TINY | source | {"output": str(tmp_path / "out")})
    for use in (write_run_yaml, api.train, api.verify, Run.dump):
        with raises("LS1118"):
            use(whole)  # type: ignore[operator]
    assert "hunter2" not in "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("part", ["set", "over", "trials"])
def test_no_way_into_run_yaml_by_a_sweep(part: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TINY | {"output": str(tmp_path / "out")}))
    keys = {"model.config.own": "http://me:hunter2@host/"}
    asked = {"over": {"seed": [1]}} | {part: {"set": keys, "over": {k: [v] for k, v in keys.items()}}.get(part, [keys])}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"run": "run.yaml"} | asked))
    options = dict.fromkeys(("metric", "split", "parallel", "search", "out")) | {"over": []}
    with raises("LS1118") as caught:
        Leaderboard(sweep_file.read(str(path), {}, [], options), console.Console(False))
    assert "hunter2" not in str(caught.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.processes
def test_outputs_of_data_with_secrets_and_escapes(tmp_path: Path, job: CommandJob) -> None:
    text, label = TOLD.replace("\ud800", ""), f"joy \x1b[2J {TOKEN}"
    rows = [{"text": f"{i} {text}", "label": label if i % 2 else "b"} for i in range(80)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    launch = {"device": "cpu", "threads": 1, "processes": 1}
    job.write(data={"source": "rows.jsonl", "max_length": 32}, launch=launch, steps=2, evaluate={"every": 1})
    out = job.finish()
    folder = tmp_path / "out"
    paths = [path for path in folder.iterdir() if path.is_file()] + [folder / "export/README.md"]
    assert {"samples.jsonl", "tables.json", "report.html", "log.txt"} <= {path.name for path in paths}
    for path in paths:
        clean(path.read_text(encoding="utf-8"))
    clean(out)
    assert label in json.loads((folder / "export/config.json").read_text())["label2id"], "the model's own labels stay"
    assert load(folder / "run.yaml", []).steps == 2
