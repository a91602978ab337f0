"""`lockstep init` recognizes real-world data, asks about it, notes it, or refuses it with a remedy; its arithmetic
equals training's."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config import plugins
from lockstep.config.run import RunError, load
from lockstep.data.prepare import prepare
from lockstep.lab.init import columns, detect_layout, questions
from lockstep.lab.init.init import _unread
from lockstep.tasks.models import models
from lockstep.tasks.models.model_configs import ModelChoice
from lockstep.track.console import Console
from support.command import ended, start
from support.init_runs import EMOTION, answering, check_arithmetic, here, jsonl, steps_in, written
from support.messages import mentions

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

__all__ = ["here"]  # fixtures


# -- local files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "distilbert", "llama", "t5", "nosuchtype"])
def test_requested_model_type_is_built_small(here: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "all.csv").write_text("text,label\n" + "".join(f"some words {i},{i % 2}\n" for i in range(40)))
    status = main(["init", "run.yaml", "--yes", "--data", "all.csv", f"model.type={kind}"])
    if kind == "nosuchtype":
        assert status == 2
        assert mentions(capsys.readouterr().err, "LS3130", "'nosuchtype'")
        return
    assert status == 0
    run = load("run.yaml", [])
    model = models.build(ModelChoice.of(run), "classification", Tokens(), empty=True)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000


class Tokens:
    """The tokenizer attributes that building a model needs."""

    pad_token_id, bos_token_id, eos_token_id, sep_token_id = 1, 3, 2, 2

    def __len__(self) -> int:
        return 100

    def get_vocab(self) -> dict[str, int]:
        return {str(id_): id_ for id_ in range(100)}


def test_a_table_without_a_header(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.csv").write_text("".join(f'"I feel it, {i}",{"joy" if i % 2 else "fear"}\n' for i in range(150)))
    run = written("--data", "a.csv")
    assert (run.data.columns, run.task.options["label"]) == (["text", "label"], "label")
    assert "a.csv has no header" in capsys.readouterr().out
    check_arithmetic(here / "run.yaml")
    assert steps_in(run)[0] == 134  # of 150: a tenth of each label is rounded, and cut off


def test_folders_of_labels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, labels in (("train", ("neg", "pos", "unsup")), ("test", ("neg", "pos"))):
        for label in labels:
            (here / f"films/{split}/{label}").mkdir(parents=True)
            for i in range(40):
                (here / f"films/{split}/{label}/{i}.txt").write_text(f"a {label} film {i}")
    run = written("--data", "films")
    assert (run.data.layout, run.task.options["text"]) == ("class_folders", "text")
    said = capsys.readouterr().out
    assert "a folder for each label: neg, pos, unsup" in said
    assert "note: unsup: texts in train, none in test" in said.replace("\n", " ")
    check_arithmetic(here / "run.yaml")


def test_files_side_by_side(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "texts").mkdir()
    (here / "texts/train.en").write_text("".join(f"the house {i}\n" for i in range(90)))
    (here / "texts/train.de.gz").write_bytes(gzip.compress("".join(f"das Haus {i}\n" for i in range(90)).encode()))
    run = written("--data", "texts", "task.source=en", "task.target=de")
    assert (run.data.layout, run.task.name) == ("parallel", "translation")
    assert "note" not in capsys.readouterr().out
    written("--data", "texts/train.en", path="b.yaml")
    assert load("b.yaml", []).data.train == ["texts/train.de.gz", "texts/train.en"]
    assert "edit task.source and task.target" in capsys.readouterr().out
    check_arithmetic(here / "b.yaml")


def test_without_sacrebleu_there_is_no_bleu(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(questions.importlib.util, "find_spec", lambda name: None)
    jsonl(here / "data", [{"source": f"the house {i}", "target": f"das Haus {i}"} for i in range(40)])
    assert written("--data", "data").task.options["bleu"] is False
    assert "sacrebleu is not installed" in capsys.readouterr().out


def test_a_test_split_without_labels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jsonl(here / "data", EMOTION)
    jsonl(here / "data", [{"id": 1, "text": "what will it be?"}] * 5, "test.jsonl")
    run = written("--data", "data")
    assert "the test split has no column mood: it is not scored" in capsys.readouterr().out
    prepared = prepare(run, plugins.find("tasks", "classification"))  # type: ignore[arg-type]
    assert set(prepared.splits) == {"train", "validation"}
    assert prepared.facts["left_out"] == {"test": 5}
    (here / "no").mkdir()
    rows = "".join(f"text {i},{i % 2}\n" for i in range(40))
    (here / "no/train.csv").write_text(rows)
    (here / "no/test.csv").write_text("what is it\n" * 4)
    run = written("--data", "no", path="no.yaml")
    assert (run.data.train, run.data.test, run.data.columns) == (["no/train.csv"], None, ["text", "label"])


def test_booleans_and_integral_floats_as_labels(here: Path) -> None:
    (here / "a.csv").write_text("text,is_spam\n" + "".join(f"words {i},{i % 2 == 0}\n" for i in range(60)))
    run = written("--data", "a.csv")
    assert run.task.options["label"] == "is_spam"
    assert prepare(run, plugins.find("tasks", "classification")).facts["labels"] == ["False", "True"]  # type: ignore[arg-type]
    (here / "b.csv").write_text("text,stars\n" + "".join(f"words {i},{i % 3}.0\n" for i in range(60)))
    run = written("--data", "b.csv", path="b.yaml")
    assert prepare(run, plugins.find("tasks", "classification")).facts["labels"] == ["0", "1", "2"]  # type: ignore[arg-type]


def test_conversations_get_a_template(here: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}]} for i in range(60)
    ]
    jsonl(here / "chat", rows)
    template = written("--data", "chat").task.options["chat_template"]
    assert "assistant" in template
    assert "{{ eos_token }}" in template  # so that the model learns to stop
    assert "does not learn to stop" not in (here / "run.yaml").read_text()
    check_arithmetic(here / "run.yaml")


def test_blocks_of_text_are_counted(here: Path) -> None:
    (here / "book.txt").write_text("".join(f"line {i}; of a long book with words\n" for i in range(400)))
    assert written("--data", "book.txt").task.options["document"] == "line"  # its semicolons are not labels
    check_arithmetic(here / "run.yaml")


# rows -> what is refused, and what to do instead
REFUSED = {
    "lists of labels in a text": (
        [{"text": f"t {i}", "tags": ["a", "a,b"][i % 2]} for i in range(50)],
        "lists of labels",
    ),
    "texts of which any might be meant": (
        [{"left": f"some words {i}", "right": f"other words {i}"} for i in range(50)],
        "do not determine a task",
    ),
    "as many numbers as rows": ([{"text": f"t {i}", "label": i} for i in range(50)], "nearly one per row"),
}


# rows -> the task's keys that they get
LEARNED = {
    "several labels": (
        [{"text": f"t {i}", "labels": ["a", "b"][: i % 3]} for i in range(50)],
        {"text": "text", "label": "labels", "multi_label": True},
    ),
    "a column for each label": (
        [{"comment": f"t {i}", "toxic": i % 2, "insult": i // 2 % 2, "threat": i // 4 % 2} for i in range(50)],
        {"text": "comment", "label": ["toxic", "insult", "threat"], "multi_label": True},
    ),
}


def test_numeric_label_without_a_telling_name_is_a_doubt(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jsonl(here / "data", [{"text": f"t {i}", "valence": i / 7} for i in range(50)])
    assert written("--data", "data").task.options["regression"]
    assert "task.label: valence; its name does not mark it as the target" in capsys.readouterr().out


@pytest.mark.parametrize("case", LEARNED)
def test_lists_of_labels_and_numbers_are_recognised(case: str, here: Path) -> None:
    rows, wanted = LEARNED[case]
    jsonl(here / "data", rows)
    run = written("--data", "data")
    assert wanted.items() <= run.task.options.items()
    check_arithmetic(here / "run.yaml")


def test_a_test_split_without_the_labels_is_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"comment": f"t {i}", "toxic": i % 2, "insult": i // 2 % 2} for i in range(60)]
    jsonl(here / "data", rows)
    (here / "data" / "test.jsonl").write_text('{"comment": "one"}\n{"comment": "two"}\n')
    run = written("--data", "data")
    assert "the test split has no column ['toxic', 'insult']" in capsys.readouterr().out
    assert "test" not in prepare(run, plugins.find("tasks", "classification")).splits  # type: ignore[arg-type]


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_fits_no_task_is_refused(case: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows, wanted = REFUSED[case]
    jsonl(here / "data", rows)
    assert main(["init", "--yes", "--data", "data"]) == 2
    assert wanted in capfd.readouterr().err
    assert not (here / "run.yaml").exists()


def test_a_table_with_another_separator(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "a.csv").write_text("text;label\n" + "".join(f"words, {i};{i % 2}\n" for i in range(60)))
    assert written("--data", "a.csv", "--model", "scratch").data.separator == ";"
    assert "a.csv is separated by semicolons: data.separator=';'" in capfd.readouterr().out
    check_arithmetic(here / "run.yaml")


def test_init_refuses_data_that_training_refuses(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    jsonl(here / "data", [*EMOTION, {"id": 0, "text": None, "mood": "joy"}])
    assert main(["init", "--yes", "--data", "data"]) == 2
    assert mentions(capfd.readouterr().err, "LS2323", "data.drop_missing=true")
    assert written("--data", "data", "data.drop_missing=true").data.drop_missing


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([["text", "label"], ["a b", "1"]], True),
        ([["id", "phrase"], ["1", "a b"]], True),
        ([["en", "de"], ["a b", "c d"]], True),
        ([["phrase", "points"], ["a b", "1"], ["c d", "2"]], True),
        ([["good film", "1"], ["bad film", "0"]], False),
        ([["good film", "pos"], ["bad film", "neg"], ["a film", "pos"]], False),
        ([["it is a very long text of a film", "x"], ["b", "y"]], False),
        ([["sun", "Sonne"], ["moon", "Mond"]], None),
        ([["Go on.", "Weiter!"], ["Stop it.", "Halt!"]], False),
        ([["text", "label"], ["text", "label"]], None),
    ],
)
def test_header_rows_are_recognized(rows: list[list[str]], wanted: bool | None) -> None:
    assert detect_layout.has_header(rows) is wanted


# columns and their kinds -> a doubt, or none
def looked(**kinds: str) -> columns.DatasetProfile:
    few = {name: 3 for name, kind in kinds.items() if kind in ("number", "label")}
    return columns.DatasetProfile(
        "x", {"train": 99}, kinds, few, {n: 50 for n, kind in kinds.items() if kind == "text"}
    )


@pytest.mark.parametrize(
    ("kinds", "keys", "doubts"),
    [
        ({"title": "text", "body": "text", "label": "number"}, {"text": "body", "label": "label"}, {"text"}),
        ({"text": "text", "coarse_label": "label", "fine_label": "label"}, {"label": "coarse_label"}, {"label"}),
        ({"text_a": "text", "text_b": "text", "y": "number"}, {"text": "text_a", "text_pair": "text_b"}, set()),
        ({"url": "text", "text": "text", "airline_sentiment": "number"}, {"label": "airline_sentiment"}, set()),
    ],
)
def test_ambiguous_columns_are_a_doubt(kinds: dict[str, str], keys: dict[str, str], doubts: set[str]) -> None:
    task, found = columns.guess(looked(**kinds))
    assert task == "classification"
    assert keys.items() <= found.keys.items()
    assert set(found.doubts) == doubts


# -- paths -----------------------------------------------------------------------------------------------------------


def test_paths_are_written_from_the_folder_of_the_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(here / "data", EMOTION)
    (here / "jobs").mkdir()
    written("--data", "data", path="jobs/run.yaml")
    assert "source: ../data" in (here / "jobs/run.yaml").read_text()
    monkeypatch.chdir("/")
    assert Path(str(load(here / "jobs/run.yaml", []).data.source)) == here / "data"
    check_arithmetic(here / "jobs/run.yaml")


@pytest.mark.processes
def test_written_run_files_train_from_any_folder(here: Path, cache: Path) -> None:
    """The cases are a table without a header, folders of labels and files side by side; all share one process, to
    import torch once."""
    (here / "table.csv").write_text("".join(f"words {i},{i % 2}\n" for i in range(60)))
    for label in ("neg", "pos"):
        (here / f"folders/{label}").mkdir(parents=True)
        for i in range(30):
            (here / f"folders/{label}/{i}.txt").write_text(f"a {label} film {i}")
    (here / "sides").mkdir()
    for language, words in (("en", "the house"), ("de", "das Haus")):
        (here / f"sides/train.{language}").write_text("".join(f"{words} {i}\n" for i in range(60)))
    names = ("table.csv", "folders", "sides")
    for name in names:
        written("--data", name, path=f"{name}.yaml")
    (here / "elsewhere").mkdir()
    code = (
        f"from lockstep.cli import main\nfor name in {names}:\n"
        "    main(['train', f'../{name}.yaml', 'steps=2', 'launch.processes=1', f'output={name}'])\n"
    )
    status, _, err = ended(start([sys.executable, "-c", code], here / "elsewhere", cache), 400)
    assert status == 0, err
    assert [name for name in names if not (here / f"elsewhere/{name}/export/config.json").exists()] == [], err


# -- questions -------------------------------------------------------------------------------------------------------


def test_invalid_answers_are_asked_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    jsonl(here / "data", [{"title": f"a {i}", "body": f"long text {i}", "kind": i % 3} for i in range(60)])
    wrong_then_right = ["nowhere.csv", "data", "poetry", "classification", "kinds", "kind", "no/such/model", "scratch"]
    asked = answering(monkeypatch, *wrong_then_right[:4], "bodi", "body", *wrong_then_right[6:])
    code = main(["init", "task.label=kind"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert len(asked) == 8
    for text in ("no such file or folder: nowhere.csv", "'poetry'", "'bodi'", "no/such/model"):
        assert text in said
    assert load("run.yaml", []).task.options["text"] == "body"


def test_columns_and_dropped_rows_are_asked_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "a.csv").write_text("".join(f"words {i},{'' if i == 7 else i % 2}\n" for i in range(60)))
    answering(monkeypatch, "a.csv", "what", "what,kind", "", "", "perhaps", "yes")
    assert main(["init"]) == 0
    run = load("run.yaml", [])
    assert (run.data.columns, run.data.drop_missing) == (["what", "kind"], True)


def test_errors_that_another_model_cannot_fix_are_not_asked_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    jsonl(here / "data", [*EMOTION, {"id": 0, "text": None, "mood": "joy"}])
    asked = answering(monkeypatch, "data", "", "scratch", "no")
    assert main(["init"]) == 2
    assert len(asked) == 4
    assert mentions(capfd.readouterr().err, "LS2323", "data.drop_missing=true")


def test_repeated_invalid_answers_end_with_the_error() -> None:
    def never(text: str) -> str:
        raise RunError(f"{text} will not do")

    with pytest.raises(RunError, match="x will not do"):
        questions.Prompter(lambda question, default: "x", Console(False)).answer("What?", "", never)


def test_a_question_of_yes_and_no() -> None:
    answers = iter(["perhaps", "Y", "n"])
    asked = questions.Prompter(lambda question, default: next(answers), Console(False))
    assert (asked.sure("?", False), asked.sure("?", True)) == (True, False)
    assert questions.Prompter(None, Console(False)).sure("?", True)


def test_rows_are_checked_from_beginning_to_end(here: Path) -> None:
    rows = [{"text": f"t {i}", "kind": "a" if i < 3000 else "b"} for i in range(6000)]
    (here / "sorted.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = columns.look(load(None, {}, {"data": {"source": "sorted.jsonl"}, "model": {"type": "gpt2"}}).data)
    assert found.few == {"kind": 2}


def test_constant_columns_raise_no_doubt(here: Path) -> None:
    jsonl(here / "data", [{"body": f"t {i}", "lang": "en", "label": i % 3} for i in range(60)])
    found = columns.look(load(None, {}, {"data": {"source": "data"}, "model": {"type": "gpt2"}}).data)
    assert columns.guess(found) == ("classification", columns.Fit({"text": "body", "label": "label"}))


def test_columns_that_are_read_where_no_key_names_them_are_not_called_unread() -> None:
    told: Any = SimpleNamespace(plain=False, languages=[], kinds=dict.fromkeys(["prompt", "chosen", "rejected", "id"]))
    assert _unread(told, {"name": "preference", "prompt": "prompt"}) == "; not read: id"
    assert _unread(told, {"name": "embedding", "anchor": "prompt", "positive": "chosen", "negative": ["rejected"]}) == (
        "; not read: id"
    )
    assert _unread(told, {"name": "language_modeling", "text": "prompt"}) == "; not read: chosen, rejected, id"
