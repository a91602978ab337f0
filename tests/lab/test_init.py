"""`lockstep init` finds the columns, writes a file that loads and trains unchanged, and replaces nothing without
permission."""

import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.error_messages import read_yaml
from lockstep.config.run import load
from lockstep.config.sections import ModelSection
from lockstep.lab.init import questions
from lockstep.lab.init.init import scalar
from lockstep.tasks.classification import Classification
from lockstep.tasks.models import config_checks
from support.command import ended, start
from support.contributed import example
from support.harness import TINY
from support.init_runs import EMOTION, answering, here, jsonl, written
from support.messages import mentions

__all__ = ["here"]  # fixtures

SERVER = questions.MachineInfo(cores=64, gpus=16, bf16=True, hub=True)


NAMED = [{}, {"name": "Ada"}]  # of messages, some of which have a key more
# rows -> the `task` section that is guessed
COLUMNS: dict[str, tuple[list[dict], dict]] = {
    "a text and a label": (EMOTION, {"name": "classification", "text": "text", "label": "mood"}),
    "numbers as labels": (
        [{"review": f"a film {i}", "stars": i % 5, "length": i % 3} for i in range(60)],
        {"name": "classification", "text": "review", "label": "stars"},
    ),
    "a pair": (
        [{"idx": i, "premise": f"it is {i}", "hypothesis": "it is not", "label": i % 3} for i in range(60)],
        {"name": "classification", "text": "premise", "text_pair": "hypothesis", "label": "label"},
    ),
    "tags": (
        [{"id": str(i), "tokens": ["Ada", "sleeps"], "ner_tags": ["B-PER", "O"]} for i in range(40)],
        {"name": "token_classification", "words": "tokens", "tags": "ner_tags"},
    ),
    "two languages": (
        [{"en": f"the house {i % 19}", "de": f"das Haus {i % 19}"} for i in range(40)],
        {"name": "translation", "source": "en", "target": "de"},
    ),
    "translations": (
        [{"id": str(i), "translation": {"en": f"the house {i}", "it": f"la casa {i}"}} for i in range(40)],
        {"name": "translation", "source": "en", "target": "it"},
    ),
    "conversations": (
        [
            {"messages": [{"role": "user", "content": f"{i}?"} | NAMED[i % 2], {"role": "assistant", "content": "yes"}]}
            for i in range(40)
        ],
        {"name": "language_modeling", "messages": "messages"},
    ),
    "instructions": (
        [{"instruction": f"count to {i}", "output": f"one, two, {i}"} for i in range(40)],
        {"name": "language_modeling", "prompt": "instruction", "response": "output"},
    ),
    "texts that go together, and some that do not": (
        [{"id": i, "query": f"what is {i}", "positive": f"{i} is it", "negative": f"not {i}"} for i in range(60)],
        {"name": "embedding", "anchor": "query", "positive": "positive", "negative": "negative"},
    ),
    "two texts and how near they are": (
        [{"sentence1": f"a {i}", "sentence2": f"b {i}", "score": i / 12} for i in range(60)],
        {"name": "embedding", "anchor": "sentence1", "positive": "sentence2", "score": "score", "score_range": (0, 5)},
    ),
    "questions and contexts": (
        [
            {"question": f"who is {i}", "context": f"here is {i}", "answers": {"text": [f"{i}"], "answer_start": [8]}}
            for i in range(40)
        ],
        {"name": "question_answering", "question": "question", "context": "context", "answers": "answers"},
    ),
    "summaries": (
        [{"document": f"a long story of {i} and more of it", "summary": f"of {i}"} for i in range(40)],
        {"name": "summarization", "source": "document", "target": "summary"},
    ),
    "texts alone": (
        [{"url": f"u{i}", "text": f"a long story of {i} and more of it"} for i in range(40)],
        {"name": "language_modeling", "text": "text"},
    ),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_the_task_is_guessed_from_the_columns(case: str, here: Path) -> None:
    rows, wanted = COLUMNS[case]
    jsonl(here / "data", rows)
    run = written("--data", "data")
    assert {key: value for key, value in run.task.model_dump().items() if key in wanted} == wanted


def test_an_own_task_defines_its_column_names(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "mine_stars.py").write_text(example("tasks/rating.py"))
    jsonl(here / "data", [{"id": i, "review": f"a film {i}", "rating": i % 5} for i in range(60)])
    run = written("--data", "data", "--task", "mine_stars.Rating")
    assert run.task.options == {"text": "review", "stars": "rating", "levels": 5}
    assert run.model.type == "gpt2"  # from scratch: nothing can be fetched
    jsonl(here / "other", [{"review": f"a film {i}", "points": i % 5} for i in range(60)])
    assert main(["init", "b.yaml", "--yes", "--data", "other", "--task", "mine_stars.Rating"]) == 2


def test_plain_text_is_for_a_language_model(here: Path) -> None:
    (here / "book.txt").write_text("a line of a book\n" * 50)
    run = written("--data", "book.txt")
    assert (run.task.name, run.task.options["document"]) == ("language_modeling", "line")


def test_labelled_lines_are_for_a_classifier(here: Path) -> None:
    (here / "feelings.txt").write_text("".join(f"i feel {i};{'joy' if i % 2 else 'fear'}\n" for i in range(50)))
    assert written("--data", "feelings.txt").task.name == "classification"


def test_every_key_has_a_comment(here: Path) -> None:
    jsonl(here / "data", EMOTION)
    written("--data", "data")
    for line in (here / "run.yaml").read_text().splitlines():
        assert line.startswith("#") or line.rstrip().endswith(":") or "  # " in line, line


def test_existing_file_is_not_overwritten(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "run.yaml").write_text("mine")
    assert main(["init", "--data", "builtin/emotion", "--yes"]) == 2
    assert mentions(capfd.readouterr().err, "LS8290")
    assert (here / "run.yaml").read_text() == "mine"
    jsonl(here / "data", EMOTION)
    written("--data", "data", "--force")
    assert sorted(p.name for p in here.iterdir()) == ["data", "run.yaml"]


def test_given_keys_are_in_the_written_file(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    jsonl(here / "data", [{"text": row["text"], "mo\nod": row["mood"]} for row in EMOTION])
    words = ["--data", "data", "steps=7", "optim.learning_rate=1e-4", "model.config.n_layer=1", "seed=3"]
    run = written(*words, path="feelings.yaml")
    out = capfd.readouterr().out
    assert "columns text (text), mo\\nod (text)\n" in out
    assert 'task: {name: classification, text: text, label: "mo\\nod"}\n' in out
    assert '  label: "mo\\nod"  ' in Path("feelings.yaml").read_text()
    assert (run.name, run.steps, run.epochs, run.seed) == ("feelings", 7, None, 3)
    assert run.optim.learning_rate == 1e-4
    assert (run.model.config["n_layer"], run.model.config["n_embd"]) == (1, 128)


def test_the_length_fits_the_model(here: Path) -> None:
    jsonl(here / "data", [{"text": f"a film {i} " * 9, "label": "ab"[i % 2]} for i in range(60)])
    assert written("--data", "data", "model.config.n_positions=16").data.max_length == 16
    words = ["model.config.n_positions=16", "data.max_length=20"]
    assert main(["init", "b.yaml", "--yes", "--data", "data", *words]) == 2


def test_a_text_sets_the_main_key_of_a_section(here: Path) -> None:
    jsonl(here / "data", EMOTION)
    run = written("data=data", "task=classification", "strategy=single")
    assert (run.data.source, run.task.options["label"], run.strategy.name) == ("data", "mood", "single")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--data", "builtin/emotion", "optim.learning_rat=1"], ["optim.learning_rat", "learning_rate"]),
        (["--data", "builtin/emotion", "out=x"], ["unknown key 'out'", "output"]),
        (["--data", "none.jsonl"], ["none.jsonl", "no such file"]),
        (["--data", "builtin/emotion", "--task", "poetry"], ["--task", "poetry", "translation"]),
        (["--data", "numbers"], ["LS8272", "a (number)", "--task"]),
        (["--data", "numbers", "--task", "translation"], ["no columns that fit translation", "a (number)"]),
        ([], ["--data"]),
        (["a.yaml", "b.yaml"], ["one run file"]),
    ],
)
def test_invalid_init_arguments_are_one_message(
    words: list[str], wanted: list[str], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    jsonl(here / "numbers", [{"a": i, "b": i * 0.5} for i in range(50)])
    assert main(["init", "--yes", *words]) == 2
    said = capfd.readouterr().err
    assert said.count("lockstep: ") == 1
    for text in wanted:
        assert text in said, said
    assert sorted(p.name for p in here.iterdir()) == ["numbers"]


def test_a_machine_with_gpus_and_a_network(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions.MachineInfo, "look", staticmethod(lambda: SERVER))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    jsonl(here / "data", EMOTION * 20)
    run = written("--data", "data")
    assert run.precision == "bf16"
    assert run.micro_batches == 32  # room for twice as many GPUs
    assert run.model.source == Classification.default_model


@pytest.mark.parametrize("processes", [1, 2, 3, 8, 12, 16])
def test_micro_batches_are_a_power_of_two_with_room_to_grow(processes: int) -> None:
    here = questions.MachineInfo(cores=64, gpus=processes, bf16=True, hub=True)
    filled = {"batch_size": 1, "micro_batches": 1, "epochs": 3, "task": {"name": "classification"}}
    found = questions.with_steps(filled, 10_000, here)
    assert found["micro_batches"].bit_count() == 1
    assert 2 * here.processes <= found["micro_batches"] <= found["batch_size"]


def test_a_small_model_that_translates_reads_its_source() -> None:
    """Unscaled embeddings beside sinusoidal positions, or few steps, leave a language model that ignores the source."""
    for kind, scaled in (("marian", True), ("pegasus", True), ("bart", None)):
        section = ModelSection(type=kind, config=questions.small_config(kind, 32))
        assert section.config.get("scale_embedding") == scaled
        assert config_checks.unscaled_embeddings(section) == []
        assert len(config_checks.unscaled_embeddings(ModelSection(type=kind))) == (scaled is True)
    small = questions.scratch("translation", 32, 500)
    assert small["model"]["config"]["scale_embedding"]
    filled = {"batch_size": 1, "micro_batches": 1, "epochs": 3, "task": {"name": "translation"}, **small}
    for examples, chosen, epochs in (
        (450, (), 11),
        (36, (), questions.MOST_EPOCHS),
        (30_000, (), 3),
        (450, ("epochs",), 3),
    ):
        assert questions.with_steps(filled, examples, SERVER, chosen)["epochs"] == epochs


def test_t5_gets_its_prefix(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions.MachineInfo, "look", staticmethod(lambda: SERVER))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    jsonl(here / "data", COLUMNS["two languages"][0])
    assert written("--data", "data").task.options["prefix"] == "translate English to German: "


def test_init_asks_for_data_task_and_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(here / "data", EMOTION)
    asked = answering(monkeypatch, "data", "", "")
    assert main(["init"]) == 0
    assert [question.split(" ")[0] for question in asked] == ["Data", "Task", "Model"]
    assert "[classification]" in asked[1]
    assert "[scratch]" in asked[2]
    assert load("run.yaml", []).task.options["label"] == "mood"


def test_answers_override_the_guess(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(here / "data", EMOTION)
    answering(monkeypatch, "data", "language_modeling", "my/model")
    assert main(["init"]) == 0
    run = load("run.yaml", [])
    assert (run.task.name, run.task.options["text"], run.model.source) == ("language_modeling", "text", "my/model")


def test_end_of_input_ends_init(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    answering(monkeypatch)
    assert main(["init"]) == 2
    assert mentions(capfd.readouterr().err, "LS8300")
    assert list(here.iterdir()) == []


@pytest.mark.processes
def test_written_run_files_train(here: Path, cache: Path) -> None:
    """The file of each task trains unchanged except for fewer steps; all runs share one process, to import torch
    once."""
    cases = {"classes": "a text and a label", "tags": "tags", "sides": "two languages", "answers": "instructions"}
    for name, case in cases.items():
        jsonl(here / name, COLUMNS[case][0])
        written("--data", name, path=f"{name}.yaml")
    code = (
        f"from lockstep.cli import main\nfor name in {list(cases)}:\n"
        "    main(['train', f'{name}.yaml', 'steps=2', 'launch.processes=1', 'launch.threads=1'])\n"
    )
    status, _, err = ended(start([sys.executable, "-c", code], here, cache), 400)
    assert status == 0, err
    assert [name for name in cases if not (here / f"outputs/{name}/export/config.json").exists()] == [], err


@pytest.mark.parametrize("mark", ["\u200f", "\u202e", "\u2066", "\ufeff", "\u2028"])
def test_no_mark_that_turns_text_is_written_raw(mark: str) -> None:
    """Bidirectional marks are escaped, so the displayed text equals the value."""
    value = {"label": f"gut{mark}tug", "other": "caf\xe9"}
    text = scalar(value)
    assert mark not in text
    assert read_yaml(text) == value
    assert scalar("caf\xe9") == "caf\xe9"
    run = load(None, [], TINY | {"data": {"source": "builtin/emotion", "columns": [value["label"]]}})
    assert mark not in run.dump()
    assert read_yaml(run.dump())["data"]["columns"] == [value["label"]]


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("optim.learning_rate=abc", "LS1002", "optim.learning_rate: invalid value 'abc'"),
        ("task.nope=1", "LS1000", "task.nope"),
        ("micro_batches=4000", "LS1103", "micro_batches (4000)"),
    ],
)
def test_a_refusal_cites_no_file_that_is_not_there(
    override: str, code: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl(here, EMOTION, "moods.jsonl")
    assert main(["init", "new.yaml", "--data", "moods.jsonl", "--yes", override]) == 2
    err = capsys.readouterr().err
    assert mentions(err, code, said)
    assert "new.yaml" not in err
    assert not Path("new.yaml").exists()
