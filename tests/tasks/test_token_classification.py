"""Token classification: tags on first tokens, entities as conlleval and seqeval count them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.cli import main
from lockstep.config.run import Run, RunError
from lockstep.data.batch import IGNORED
from lockstep.data.job import Job
from lockstep.tasks.task import spread_rows
from lockstep.tasks.token_classification import TokenClassification, entities, parts
from support.messages import raises
from support.task_runs import make, write

# tags -> the entities that conlleval finds (worked out by hand)
MARKED = {
    "O B-P I-P O B-L": {(1, 3, "P"), (4, 5, "L")},
    "B-P B-P I-P": {(0, 1, "P"), (1, 3, "P")},
    "I-P I-P B-L I-P": {(0, 2, "P"), (2, 3, "L"), (3, 4, "P")},
    "S-P B-L I-L E-L O": {(0, 1, "P"), (1, 4, "L")},
    "B-P L-P U-P U-P B-L I-L L-L": {(0, 2, "P"), (2, 3, "P"), (3, 4, "P"), (4, 7, "L")},
    "b-P i-P b-P O": {(0, 2, "P"), (2, 3, "P")},
    "B_P M_P E_P W_P S_P": {(0, 3, "P"), (3, 4, "P"), (4, 5, "P")},
    "P-B P-I P-B O": {(0, 2, "P"), (2, 3, "P")},
    "B M E S S": {(0, 3, "_"), (3, 4, "_"), (4, 5, "_")},
    "I-P E-P I-P E-P E-P O": {(0, 2, "P"), (2, 4, "P"), (4, 5, "P")},
    "NN-TL NN-HL V_S NN-TL": {(0, 1, "NN-TL"), (1, 2, "NN-HL"), (2, 3, "V_S"), (3, 4, "NN-TL")},
    "B-P I-P MISC MISC": {(0, 2, "P"), (2, 3, "MISC"), (3, 4, "MISC")},
    "NOUN VERB NOUN": {(0, 1, "NOUN"), (1, 2, "VERB"), (2, 3, "NOUN")},
    "O O": set(),
}


@pytest.mark.parametrize("tags", MARKED)
def test_entities_are_what_the_tags_mark(tags: str) -> None:
    assert marked(tags.split()) == MARKED[tags]


def marked(tags: list[str]) -> set[tuple[int, int, str]]:
    read = parts(tags)
    return entities([read[tag] for tag in tags])


@pytest.mark.extras
def test_entities_match_seqeval() -> None:
    metrics = pytest.importorskip("seqeval.metrics.sequence_labeling")
    draw = np.random.default_rng(0)
    schemes = {"BIES": "BIES", "BILU": "BIES", "BMES": "BIES", "BMEW": "BIES", "BI": "BI", "IE": "IE"}
    for letters, theirs in schemes.items():
        known = [f"{letter}-{kind}" for letter in letters for kind in "PL"]
        read = parts(["O", *known])
        for _ in range(200):
            tags = draw.choice(["O", *known], 8).tolist()
            same = [f"{dict(zip(letters, theirs, strict=True)).get(tag[0], 'O')}{tag[1:]}" for tag in tags]
            wanted = {(a, b + 1, kind) for kind, a, b in metrics.get_entities(same)}
            assert entities([read[tag] for tag in tags]) == wanted, tags


@pytest.mark.extras
@pytest.mark.parametrize("name", ["IOB2", "IOE2", "IOBES", "BILOU"])
def test_whole_entities_match_seqevals_schemes(name: str) -> None:
    """Written from entities that are drawn, so that every row is one that the scheme allows."""
    schemes = pytest.importorskip("seqeval.scheme")
    letters = {"IOB2": "BIIB", "IOE2": "IIEE", "IOBES": "BIES", "BILOU": "BILU"}[name]  # first, inside, last, only
    draw = np.random.default_rng(0)
    for _ in range(50):
        tags: list[str] = []
        for size, kind in zip(draw.integers(0, 4, 6), draw.choice(["P", "KIND"], 6), strict=True):
            first, inside, last, only = letters
            places = {0: "O", 1: only, 2: first + last, 3: first + inside + last}[int(size)]
            tags += [place if place == "O" else f"{place}-{kind}" for place in places]
        found = schemes.Entities([tags], getattr(schemes, name)).entities[0]
        read = parts([*tags, *(f"{letter}-{kind}" for letter in letters for kind in ("P", "KIND"))])
        assert entities([read[tag] for tag in tags]) == {(e.start, e.end, e.tag) for e in found}


def test_tags_of_unknown_schemes_are_refused() -> None:
    with raises("LS3360", "'X-P'"):
        parts(["B-P", "I-P", "X-P", "O"])


def task_of(run: Run) -> TokenClassification:
    return TokenClassification(run).opened(Job.of(run).with_data().data)


def test_first_token_of_a_word_has_its_tag(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "token_classification", "tokenizer.vocab_size=290"))  # words fall into micro-batches
    columns = task.splits["train"]
    lines = (tmp_path / "token_classification" / "train.jsonl").read_text().splitlines()
    for i, line in enumerate(lines[:20]):
        row = json.loads(line)
        targets = columns.ragged("targets").row(i)
        kept = targets[targets != IGNORED]
        assert [task.labels[tag] for tag in kept] == row["tags"][: len(kept)]
        if len(targets) < 32:
            assert len(kept) == len(row["tags"])
            assert (
                task.tokenizer.decode(columns.ragged("input_ids").row(i), skip_special_tokens=True).split()
                == row["tokens"]
            )
    assert any(len(columns.ragged("targets").row(i)) > columns.flat("count")[i] + 2 for i in range(20))


def test_a_row_without_a_target_is_an_example(tmp_path: Path) -> None:
    """The row's words have no tokens."""
    task = task_of(make(tmp_path, "token_classification"))
    columns, rows = task.splits["validation"], np.arange(3)
    batch = task.collate(columns, rows, 0)
    batch.targets[1] = IGNORED
    logits = torch.zeros(*batch.targets.shape, len(task.labels))
    found = task.score_at(lambda inputs: logits, batch, columns, rows)
    assert found["examples"] == 3
    assert found["targets"] == (batch.targets >= 0).sum()
    blank = task.collate(columns, rows[:0], 0)
    none = task.score_at(lambda inputs: torch.zeros(*blank.targets.shape, len(task.labels)), blank, columns, rows[:0])
    assert none["examples"] == none["targets"] == 0


def test_samples_name_the_entities(tmp_path: Path) -> None:
    """The samples of a model with correct predictions, and of one without any."""
    task = task_of(make(tmp_path, "token_classification", "tokenizer.vocab_size=290"))
    rows = [json.loads(line) for line in (tmp_path / "token_classification/validation.jsonl").read_text().splitlines()]
    columns = task.splits["validation"]
    batch = task.collate(columns, spread_rows(columns, 3), 0)
    right = torch.nn.functional.one_hot(batch.targets.clamp(min=0), len(task.labels)).float()
    nothing = torch.nn.functional.one_hot(torch.full_like(batch.targets, task.labels.index("O")), len(task.labels))
    for logits, says in ((right, True), (nothing, False)):
        samples = task.samples(None, lambda inputs, logits=logits: logits)  # type: ignore[arg-type,misc]
        assert len(samples) == 3
        for sample, row in zip(samples, spread_rows(columns, 3), strict=True):
            wanted = rows[row]
            assert sample["text"].split() == wanted["tokens"][: len(sample["text"].split())]
            assert (sample["found"] == sample["right"]) == (says or sample["right"] == "none")
            held = [w for w, t in zip(wanted["tokens"], wanted["tags"], strict=True) if t != "O"]
            assert sample["right"].replace(" (ANIMAL)", "").replace(",", "").split() == (held or ["none"])


@pytest.mark.processes
def test_training_finds_the_entities(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make(
        tmp_path, "token_classification", "steps=60", "micro_batches=2", "launch.processes=1", "strategy.name=single"
    )
    path = tmp_path / "run.yaml"
    path.write_text(run.dump())
    assert main(["train", str(path)]) == 0
    last = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["f1"] > 0.7
    assert last["accuracy"] > 0.8
    capfd.readouterr()
    assert main(["predict", str(tmp_path / "out"), "the dog runs"]) == 0
    assert capfd.readouterr().out.strip() == "the/O dog/B-ANIMAL runs/O"


BAD = {
    "no such column": (["task.words=words"], ["task.words", "'words'", "it has tokens, tags"]),
    "no room for a word": (["data.max_length=2"], ["no token of the text is left", "data.max_length"]),
    "a model that cannot tag": (["model={type: marian}"], ["no token classifier", "marian"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_one_message(case: str, tmp_path: Path) -> None:
    overrides, wanted = BAD[case]
    with pytest.raises(RunError) as caught:
        task_of(make(tmp_path, "token_classification", *overrides))
    for part in wanted:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([{"tokens": ["a", "b"], "tags": ["O"]}], ("LS3363",)),
        ([{"tokens": [], "tags": []}], ("LS3364",)),
    ],
)
def test_bad_rows_are_refused(rows: list[dict], wanted: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    write(path, rows * 4)
    with raises(*wanted):
        task_of(make(tmp_path, "token_classification", f"data={json.dumps({'source': str(path), 'max_length': 32})}"))


def test_a_tag_that_is_never_trained_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path, "token_classification")
    rows = [{"tokens": ["a"], "tags": ["O"]}] * 2 + [{"tokens": ["a", "b"], "tags": ["O", "B-NEW"]}]
    write(tmp_path / "token_classification" / "validation.jsonl", rows)
    with raises("LS3361", "'B-NEW' (row 2)"):  # though row 1 repeats row 0
        task_of(run)
