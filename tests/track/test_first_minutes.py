"""The first minutes of a run: immediate output, progress and quality so far, and what to do next."""

import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Value
from rich.cells import cell_len

from lockstep.config import plugins
from lockstep.config.model_selection import Best
from lockstep.data import arrow_cache, hub
from lockstep.launchers import start
from lockstep.tasks.classification import Classification
from lockstep.tasks.module import Module
from lockstep.tasks.task import Task
from lockstep.track import busy
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import error, joined, on_a_line
from lockstep.training.summary import parameters, what_next
from support.command import CommandJob, free_port
from support.consoles import TRAIN, console, screen
from support.harness import tiny

# -- while nothing else is said --------------------------------------------------------------------------------------


def test_a_terminal_shows_a_line_that_moves_and_vanishes() -> None:
    told, out = console(terminal=True, width=40)
    place = "importing torch"
    with told.busy(lambda: place):
        place = "tokenising, 3,000 of 12,000 examples of a long name"
        told.facts({"tokens": "made"})
    text = out.getvalue()
    assert "importing torch 0:00" in text
    assert all(cell_len(line) <= 40 for line in screen(text)), "cut to the terminal"
    assert screen(text)[0] == "tokens     made", "what is said stands above, and stays"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"
    assert text.index("\x1b[?25h") < text.index("made"), "and was there all the time: a killed process restores nothing"


def test_without_a_terminal_progress_is_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "PAUSES_S", (0.01,))
    told, out = console(terminal=False)
    with told.busy(lambda: "tokenising, 3,000 of 12,000 examples"):
        while not out.getvalue():
            time.sleep(0.01)
    assert out.getvalue() == "preparing  tokenising, 3,000 of 12,000 examples (0:00)\n"


@pytest.mark.parametrize("options", [{"voice": "quiet"}, {"loud": False}])
def test_silent_consoles_show_no_progress(options: dict[str, Any]) -> None:
    told, out = console(terminal=True, **options)
    with told.busy(lambda: "importing torch"):
        pass
    assert out.getvalue() == ""


def test_first_line_is_printed_before_slow_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    said: list[str] = []

    def imports(run: Any) -> Any:
        said.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "planned", imports)
    with pytest.raises(KeyboardInterrupt):
        start.train(tiny(output=str(tmp_path / "out")))
    assert said[0].startswith("lockstep   ")
    assert f"tiny -> {tmp_path / 'out'}" in said[0]


def test_tokenizing_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    places: list[str] = []
    monkeypatch.setattr(ACTIVITY, "set", places.append)
    rows = Dataset.from_dict({"text": ["a"] * 2500})
    kind = Features({"label": Value("int64")})
    arrow_cache.encode(rows, lambda batch: {"label": [1] * len(batch["text"])}, kind, "key")
    assert places == [f"tokenising, {n} of 2,500 examples" for n in ("0", "1,000", "2,000", "2,500")]


def test_downloads_report_received_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    blobs = tmp_path / "models--somebody--gpt" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "old").write_bytes(bytes(5_000_000))
    before = ACTIVITY.name
    with hub.downloading("somebody/gpt", "model"):
        assert ACTIVITY.name == "loading somebody/gpt"
        (blobs / "new.incomplete").write_bytes(bytes(2_500_000))
        while not ACTIVITY.name.startswith("downloading"):
            time.sleep(0.05)
        assert ACTIVITY.name == "downloading somebody/gpt, 2.5 MB so far", "what was there before is not counted"
    with hub.downloading(str(tmp_path), "model"):
        assert ACTIVITY.name == f"reading {tmp_path}"
    assert ACTIVITY.name == before


# -- while it trains -------------------------------------------------------------------------------------------------


def test_lines_have_the_epoch_and_the_best_so_far() -> None:
    told, out = console(terminal=False)
    told.start(300, 0, per_epoch=100)
    told.log(1, "train", TRAIN)
    for step, loss in ((100, 0.5), (150, 0.7)):
        told.log(step, "validation", {"loss": loss})
    told._last_line -= 60  # a minute
    told.log(300, "train", TRAIN)
    first, *evaluations, last = out.getvalue().splitlines()
    assert first.startswith("step      1/300  loss 0.4321  epoch 0.01/3  rate")
    assert not first.endswith("left"), "one step is no measure"
    assert evaluations == ["step    100  validation: loss 0.5; best yet", "step    150  validation: loss 0.7"]
    assert last.startswith("step    300/300  loss 0.4321  epoch 3.00/3  best validation loss 0.5 (step 100)  rate")


@pytest.mark.parametrize(("by", "step"), [(None, 20), ("-loss", 20), ("loss", 30), ("accuracy", 10), ("nothing", None)])
def test_the_best_is_by_the_metric_that_the_run_names(by: str | None, step: int | None) -> None:
    best = Best(by)
    for number, loss, accuracy in ((10, 0.5, 0.9), (20, 0.4, 0.8), (30, 0.6, 0.9), (40, float("nan"), 0.1)):
        best.update(number, {"loss": loss, "accuracy": accuracy})
    assert best.step == step
    assert bool(best.text) is (step is not None)


def test_on_a_narrow_terminal_lines_wrap_with_an_indent() -> None:
    for terminal, lines in (
        (True, ["data       some words that are", "           too many for a line"]),
        (False, ["data       some words that are too many for a line"]),
    ):
        told, out = console(terminal, width=32)
        told.facts({"data": "some words that are too many for a line"})
        assert out.getvalue().splitlines() == lines
    told, out = console(True, width=32)
    told.facts({"next": "lockstep predict outputs/a 'some words'"}, whole=True)
    pasted = out.getvalue().partition(" ")[2].replace("\\\n", "")
    assert shlex.split(pasted) == ["lockstep", "predict", "outputs/a", "some words"], "a shell reads one command"
    assert all(len(line) <= 32 for line in out.getvalue().splitlines())
    told.note("the disk is full, and there is more")
    assert out.getvalue().splitlines()[3:] == ["note: the disk is full, and", "      there is more"]
    told.say("  gradients differ: 4 of them, by 0.5")
    told.say("lockstep train outputs/a/run.yaml b=c", whole=True)
    lines = ["  gradients differ: 4 of them,", "    by 0.5", "lockstep train outputs/a/run.yaml b=c"]
    assert out.getvalue().splitlines()[5:] == lines
    told.log(5, "validation", {"loss": 0.5, "accuracy": 0.75})
    assert out.getvalue().splitlines()[-1].startswith(" " * 13)


@pytest.mark.parametrize("text", ["it isn't so", 'he said "no, never again"', "$HOME"])
def test_a_command_on_several_lines_is_the_same_to_a_shell(text: str) -> None:
    command = f"{shlex.join(['lockstep', 'predict', 'outputs/a name', text])}  # a comment that is long"
    told, out = console(True, width=40)
    told.facts({"next": command}, whole=True)
    pasted = out.getvalue().partition(" ")[2].replace("\\\n", "")
    assert shlex.split(pasted, comments=True) == ["lockstep", "predict", "outputs/a name", text]
    assert out.getvalue().count("\n") > 1
    last, comment = out.getvalue().splitlines()[-2:]
    assert comment.lstrip() == "# a comment that is long"
    assert not last.endswith("\\"), "a comment is no part of the command"


def test_columns_can_be_scanned() -> None:
    rows = [["ddp", "same bits", "gradients travel in buckets"], ["hf_accelerate", "rounding", "x"]]
    for cut, lines in (
        (True, ["  ddp            same bits  gradients travel in b…", "  hf_accelerate  rounding   x"]),
        (False, ["  ddp            same bits  gradients travel in", " " * 28 + "buckets"]),
    ):
        told, out = console(True, width=50)
        told.columns("strategies", rows, cut)
        assert out.getvalue().splitlines()[: len(lines) + 1] == ["strategies", *lines]
    told, out = console(False, width=40)
    told.columns("strategies", rows, cut=True)
    assert "gradients travel in buckets" in out.getvalue(), "elsewhere nothing is cut"


class Model:
    """Stub weights that have only numbers."""

    parameter_count, trained_count = 1_000_000, 1_000_000


def test_the_number_of_trained_parameters_is_shown_if_not_all() -> None:
    assert parameters(Model()) == "1.00M parameters"  # type: ignore[arg-type]
    with_adapter = Model()
    with_adapter.trained_count = 20_000
    assert parameters(with_adapter) == "1.00M parameters, 20,000 trained (2%)"  # type: ignore[arg-type]


# -- at the end ------------------------------------------------------------------------------------------------------

SAMPLE = {"text": "the weather\nwas " + "very " * 60 + "good", "predicted": "joy", "label": "sadness"}


def test_samples_are_cut_to_a_line_and_shown_at_the_end(tmp_path: Path) -> None:
    told, out = console(terminal=True, width=60)
    told._log = tmp_path / "log.txt"
    told.show(20, [{"text": "early", "predicted": "x", "label": "y"}])
    told.show(40, [SAMPLE, {"prompt": "once"}])
    assert out.getvalue() == ""
    told.last_samples()
    first, second = out.getvalue().splitlines()
    assert cell_len(first) <= 60
    assert first.startswith("samples    the weather was very")
    assert first.endswith("… ⟶ joy (label: sadness)")
    assert second == "           once"
    log = (tmp_path / "log.txt").read_text()
    assert "step     20  sample: early ⟶ x (label: y)" in log
    assert "step     40  sample: the weather\n             was very" in log, "whole"


def test_verbose_prints_every_sample() -> None:
    told, out = console(terminal=False, voice="verbose")
    told.show(20, [{"source": "a house", "written": "ein Haus", "reference": "ein [Haus]"}])
    assert out.getvalue() == "step     20  sample: a house ⟶ ein Haus (reference: ein [Haus])\n"
    told.last_samples()
    assert out.getvalue().count("sample") == 1


@pytest.mark.parametrize("room", [20, 40, 79, 200, 2000])
def test_the_longest_texts_are_cut_first(room: int) -> None:
    wide = {"source": "字" * 90, "written": "short", "reference": "w" * 50}
    line = on_a_line(wide, room)
    assert cell_len(line) <= max(room, 8 * 3 + len(" ⟶  (reference: )"))
    assert "short" in line or room < 40
    assert (line == joined(wide)) is (room > 300)
    assert on_a_line({}, room) == ""


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (Classification, [], "lockstep predict 'my out' 'i feel very well today and then some more'"),
        (Classification, ["task.text_pair=other"], "lockstep predict 'my out' $'first text\\tsecond text'"),
        (Module, [], "lockstep evaluate 'my out'"),
    ],
)
def test_the_last_line_can_be_pasted(kind: type[Task], options: list[str], says: str) -> None:
    task: Any = object.__new__(kind)
    task.run = tiny(*options, output="my out")
    text = "i feel very well today and then some more words that nobody needs to see"
    assert what_next(task, [{"text": text}]) == says
    if kind is Classification and not options:
        assert what_next(task, []).endswith("'some text'")


@pytest.mark.parametrize(
    ("kind", "keys", "input"),
    [
        ("preference", {}, "'a prompt'"),
        ("preference", {"prompt": None}, "'the beginning of an answer'"),
        ("preference", {"conversations": True}, "'a message of the user'"),
        ("reward", {}, r"$'a prompt\tits answer'"),
        ("reward", {"prompt": None}, "'an answer'"),
        ("question_answering", {}, r"$'a question\ta text that holds the answer'"),
        ("language_modeling", {}, "'some text'"),
        ("language_modeling", {"prompt": "p", "response": "r"}, "'a prompt'"),
        ("language_modeling", {"messages": "m"}, "'a message of the user'"),
    ],
)
def test_the_last_line_says_what_the_task_reads(kind: str, keys: dict[str, Any], input: str) -> None:
    cls: Any = plugins.find("tasks", kind)
    task = object.__new__(cls)
    task.run = tiny(f"task={json.dumps({'name': kind, **keys})}", output="out")
    assert what_next(task, []) == f"lockstep predict out {input}"


def test_an_error_is_folded_between_words_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"what is wrong {'and more ' * 12}[LS0001]\n  task.text: {'why it is ' * 12}\n    short"
    error(text)
    assert capsys.readouterr().err == f"lockstep: {text}\n", "in a file it is as it was written"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.fileno", lambda: 2, raising=False)
    monkeypatch.setattr("lockstep.track.console.os.get_terminal_size", lambda file: os.terminal_size((60, 24)))
    error(text)
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) < 60
    assert " ".join(" ".join(lines).split()) == " ".join(f"lockstep: {text}".split())
    assert [line for line in lines if line.startswith("  task.text:")], "each part begins where it began"


def test_a_table_that_is_too_wide_breaks_the_names_of_its_columns_and_cuts_none() -> None:
    names, row = ["learning_rate", "batch_size", "loss"], ["1e-3", "16", "0.5"]
    for width, broken in ((60, False), (28, True)):
        told, out = console(True, width=width)
        told.table("trials", names, [row])
        said = out.getvalue()
        assert ("learning_rate" not in said) is broken
        assert "…" not in said
        assert ("learning_ " in said and "rate " in said) is broken


@pytest.mark.processes
def test_the_run_is_announced_once_if_ranks_share_the_terminal(job: CommandJob) -> None:
    """Under tcp and accelerate a rank is this process, or one of its children."""
    meet = ("launch.name=tcp", f"launch.init_method=tcp://127.0.0.1:{free_port()}", "launch.rank=0")
    job.write()
    status, out, err = job.train(*meet, "launch.world_size=1", "steps=1")
    assert status == 0, err
    assert [line for line in out.splitlines() if line.startswith(("lockstep ", "run "))] == [out.splitlines()[0]]
