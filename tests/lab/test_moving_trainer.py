"""`lockstep init --from` for scripts with a Trainer refuses what would change the training, and reads the rest."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.config.errors import RunError
from lockstep.lab.import_config import metric_names
from lockstep.tasks.objectives.objective import ClassificationOptions
from lockstep.tasks.objectives.one_label import OneLabel
from support.messages import mentions
from support.moving_scripts import TRAINER, USUAL, moved, refused
from support.trainer_variants import CHANGING, QUIET, TRAINED, changed


@pytest.mark.parametrize("name", CHANGING)
def test_a_script_that_changes_the_training_is_refused(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mentions(refused("train.py", CHANGING[name], capsys), "LS8209", "line ")


@pytest.mark.parametrize("name", QUIET)
def test_a_script_that_does_not_is_read(name: str, here: Path) -> None:
    run = moved("train.py", QUIET[name])
    assert run.task.name == ("language_modeling" if name.startswith("TRL") else "classification")


def test_settings_of_collators_that_decide_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collator = "DataCollatorForTokenClassification(tokenizer, label_pad_token_id=0)"
    text = changed(TRAINED, ("DataCollatorWithPadding(tokenizer)", collator))
    assert "label_pad_token_id=0" in refused("train.py", text, capsys)
    masked = changed(TRAINED, ("AutoModelForSequenceClassification", "AutoModelForMaskedLM"))
    masked = masked.replace("AutoModelForSequenceClassification", "AutoModelForMaskedLM")
    collator = "DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2, random_replace_prob=0.5)"
    text = changed(masked, ("DataCollatorWithPadding(tokenizer)", collator))
    assert "random_replace_prob=0.5" in refused("train.py", text, capsys)


@pytest.mark.parametrize("target", ["'all-linear'", "['query']"])
def test_an_adapter_without_a_task_type_leaves_a_head_frozen(
    target: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """peft trains a new head only if the task type or modules_to_save names it (tests/assumptions/test_peft.py);
    lockstep always trains it."""

    def script(*words: str) -> str:
        config = ", ".join(["r=4", f"target_modules={target}", *words])
        wrapped = f"from peft import LoraConfig, get_peft_model\nmodel = get_peft_model(model, LoraConfig({config}))\n"
        return TRAINER.replace("ARGUMENTS", USUAL).replace("args = ", f"{wrapped}args = ")

    assert "without task_type" in refused("train.py", script(), capsys)
    for words in ("task_type='SEQ_CLS'", "modules_to_save=['classifier']"):
        assert moved("train.py", script(words)).model.adapter["r"] == 4


def test_a_score_has_the_name_of_lockstep_if_its_numbers_are_the_same(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = USUAL.replace("'accuracy'", "'f1', greater_is_better=True")
    text = TRAINER.replace("ARGUMENTS", usual).replace("num_labels=5", "num_labels=2")
    text = text.replace(
        "import numpy as np", "import evaluate\nimport numpy as np\nfrom sklearn.metrics import f1_score"
    )
    usual_score = '    return {"accuracy": (np.argmax(p.predictions, -1) == p.label_ids).mean()}'
    start = "    got, want = np.argmax(p.predictions, -1), p.label_ids\n"
    counts = "    r = np.sum((got == 1) & (want == 1))\n    p, t = (got == 1).sum(), (want == 1).sum()\n"
    of_evaluate = "return evaluate.load('f1').compute(predictions=got, references=want{})"
    for code, name in (
        ('return {"f1": float(f1_score(want, got, average="macro"))}', "macro_f1"),
        ('return {"f1": f1_score(y_true=want, y_pred=got, average="micro")}', "accuracy"),
        ('return {"f1": f1_score(want, got)}', "f1"),
        ('return {"f1": f1_score(want, got, average="weighted")}', None),
        (of_evaluate.format(""), "f1"),
        (of_evaluate.format(", average='macro'"), "macro_f1"),
        (f'{counts}    p, r_ = r / (p + 1e-12), r / (t + 1e-12)\n    return {{"f1": 2 * p * r_ / (p + r_)}}', "f1"),
        (f'{counts}    return {{"f1": 2 * r / (p + t + 1)}}', None),
        ('return {"f1": np.random.rand()}', None),
        ('return {"eval_f1": f1_score(want, got)}', "f1"),
        ('if (got == 1).sum() == 0:\n        return {"f1": 0.0}\n    return {"f1": f1_score(want, got)}', "f1"),
        *(  # the numbers of our predictions are those of f1, and of others they are not
            (f'return {{"f1": {code}}}', None)
            for code in (
                "round(f1_score(want, got))",
                "round(f1_score(want, got), ndigits=1)",
                "max(f1_score(want, got), 0.1)",
                "f1_score(want, got, zero_division=1)",
                "f1_score(want, got) if len(want) < 1000 else 0.5",
                "f1_score(want, got) if want.mean() < 0.9 else 0",
            )
        ),
        ('print(got.sort())\n    return {"f1": f1_score(want, got)}', None),
        ('return evaluate.load("f1", "multilabel").compute(predictions=got, references=want)', None),
        ('return evaluate.load("acme/f1").compute(predictions=got, references=want)', None),
    ):
        script = changed(text, (usual_score, f"{start}    {code.strip()}"))
        if name is None:
            assert "metric_for_best_model: f1 (" in refused("train.py", script, capsys), code
            continue
        run = moved("train.py", script)
        assert (run.checkpoint.best, "threshold: 0.5" in Path("moved.yaml").read_text()) == (name, name == "f1"), code
        Path("moved.yaml").unlink()
    macro = changed(text, (usual_score, f"{start}    return {{'f1': f1_score(want, got, average='macro')}}"))
    assert "'-macro_f1' selects the lowest" in refused("train.py", macro.replace("better=True", "better=False"), capsys)


def test_scores_of_other_logits_or_names_are_not_followed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = USUAL.replace("'accuracy'", "'f1'")
    text = TRAINER.replace("ARGUMENTS", usual).replace("num_labels=5", "num_labels=2")
    text = text.replace(
        "import numpy as np", "import numpy as np\nfrom sklearn.metrics import accuracy_score, f1_score"
    )
    text = text.replace('{"accuracy": (np.argmax(p.predictions, -1) == p.label_ids).mean()}', "SCORE")
    score = ("SCORE", '{"f1": f1_score(p[1], p[0].argmax(-1))}')
    word = "compute_metrics=compute_metrics, preprocess_logits_for_metrics="
    other = changed(text, score, ("compute_metrics=compute_metrics", f"{word}lambda l, y: -l"))
    assert "metric_for_best_model: f1 (" in refused("train.py", other, capsys)
    again = changed(text, score, ("args = T", "f1_score = accuracy_score\nargs = T"))
    assert "metric_for_best_model: f1 (" in refused("train.py", again, capsys)
    first = ("SCORE", '{"f1": f1_score(p[1], p[0])}')
    same = changed(text, first, ("compute_metrics=compute_metrics", f"{word}lambda l, y: l.argmax(dim=-1)"))
    assert moved("train.py", same).checkpoint.best == "f1"


def test_the_scores_that_are_compared_are_those_of_the_task() -> None:
    random = np.random.default_rng(5)
    for labels in (2, 4):
        true = np.concatenate([np.arange(labels), random.integers(labels, size=40)])
        logits = random.normal(size=(len(true), labels))
        options = ClassificationOptions.model_validate({"threshold": 0.5 if labels == 2 else None})
        task = OneLabel(options, [f"label {code}" for code in range(labels)], [1] * labels, len(true))
        real = task.metrics(task.score(torch.from_numpy(logits), torch.from_numpy(true)), 0.5 if labels == 2 else None)
        for name, value in metric_names._of_lockstep(logits.argmax(-1), true, labels).items():
            assert real[name] == pytest.approx(value, abs=1e-12), name


def test_averages_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(6)
    for average, labels in (("binary", 2), ("macro", 4), ("micro", 4), ("weighted", 3)):
        true, predicted = random.integers(labels, size=(2, 50))
        theirs = metrics.precision_recall_fscore_support(true, predicted, average=average)[:3]
        assert metric_names._averaged(true, predicted, average) == pytest.approx(theirs, abs=1e-12), average


def test_the_next_step_names_the_key_that_plan_refuses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --partial the file is written before it is planned, which may take minutes."""

    def refuse(run: object, with_data: bool) -> list[str]:
        assert (here / "moved.yaml").is_file()
        raise RunError("LS6002", "checkpoint.best: 'f2' is not a metric of this task")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.lab.init.init.plan", refuse)
        moved("train.py", TRAINER.replace("ARGUMENTS", USUAL), "--partial")
    said = capsys.readouterr().out
    assert said.index("wrote moved.yaml") < said.index("lockstep plan refuses it: checkpoint.best: 'f2'")
    assert "next: correct checkpoint.best, as the note says; then lockstep plan" in said


def test_a_part_of_the_validation_split_is_a_limit_of_evaluations(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TRAINER.replace("ARGUMENTS", USUAL)
    said = refused("train.py", changed(text, ('data["test"]', 'data["test"].select(range(40))')), capsys)
    assert "evaluate.limit is the number" in said
    assert "data.limit is" not in said
    said = refused("train.py", changed(text, ('data["train"]', 'data["train"].select(range(40))')), capsys)
    assert "data.limit is" in said
    assert "evaluate.limit is" not in said


def test_a_cast_of_the_trained_model_is_refused_if_it_is_saved(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cast = TRAINER.replace("ARGUMENTS", USUAL).replace("trainer.train()\n", "trainer.train()\ntrainer.model.half()\n")
    assert "half()" in cast
    moved("cast.py", cast)
    Path("moved.yaml").unlink()
    told = refused("saved.py", cast + "\ntrainer.save_model('final')\n", capsys)
    assert "trainer.model.half() (an export has the dtype" in told


def test_what_people_write_around_a_trainer_is_understood(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINER.replace("ARGUMENTS", USUAL)
    resume = "last = None\nif os.path.isdir('out'):\n    last = get_last_checkpoint('out')\n"
    show = "class Show:\n    def __init__(self, model):\n        self.model = model\n"
    show += "    def text(self, text):\n        print(self.model(**tokenizer(text, return_tensors='pt')).logits)\n\n\n"
    head, train = "import numpy as np\n", "trainer.train()\n"
    for pairs in (
        (
            (head, f"{head}import os\nfrom transformers.trainer_utils import get_last_checkpoint\n"),
            (train, f"{resume}trainer.train(last)\n"),
        ),
        (
            (head, f"{head}import os\nfrom transformers.trainer_utils import get_last_checkpoint\n"),
            (train, f"{resume}if last:\n    trainer.train(last)\nelse:\n    trainer.train()\n"),
        ),
        (
            (
                "model = ",
                "print(data['train'].to_pandas().head())\ndf = data['train'].to_pandas()\ndf.describe()\nmodel = ",
            ),
        ),
        (("model = ", "assert callable(tokenize)\nmodel = "),),
        ((train, f"{train}{show}Show(model).text('good')\n"),),
    ):
        moved("train.py", changed(text, *pairs))
    Path("moved.yaml").unlink()
    for other in ("'other/checkpoint-5'", "get_last_checkpoint('other')", "find('out')"):
        from_there = changed(
            text,
            (head, f"{head}import os\nfrom transformers.trainer_utils import get_last_checkpoint\n"),
            (train, resume.replace("get_last_checkpoint('out')", other) + "trainer.train(last)\n"),
        )
        assert "last" in refused("train.py", from_there, capsys), other
    twice = "if last:\n    trainer.train()\n    trainer.train(last)\nelse:\n    trainer.train()\n"
    known = f"{head}import os\nfrom transformers.trainer_utils import get_last_checkpoint\n"
    twice = changed(text, (head, known), (train, f"{resume}{twice}"))
    assert "several times" in refused("train.py", twice, capsys)
    for line in ("list(map(model.requires_grad_, [False]))", "sorted([False], key=model.requires_grad_)"):
        assert f"{line[5:-1] if line.startswith('list') else line} (it may be changed there" in refused(
            "train.py", changed(text, (train, f"{line}\n{train}")), capsys
        )
    before = changed(text, (train, f"{show}Show(model).text('good')\n{train}"))
    assert "Show(model) (it may be changed there" in refused("train.py", before, capsys)
    acts = changed(
        text,
        (train, f"{train}{show}Show(model).text('good')\n"),
        ("print(self.model(", "self.model.eval()\n        print(self.model("),
    )
    moved("train.py", acts)
    Path("moved.yaml").unlink()
    zeroed = changed(
        text,
        (train, f"{train}{show}Show(model).text('good')\n"),
        ("print(self.model(", "self.model.bias.data.zero_()\n        print(self.model("),
    )
    assert "zero_()" in refused("train.py", zeroed, capsys)


HELD = """
from dataclasses import dataclass
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments


@dataclass
class Config:
    model: str = "acme/encoder"
    rate: float = 1e-4


class Experiment:
    def __init__(self, config):
        self.tokenizer = AutoTokenizer.from_pretrained(config.model)
        self.model = AutoModelForSequenceClassification.from_pretrained(config.model)
        self.data = load_dataset("acme/reviews").map(self.tokenize, batched=True)
        args = TrainingArguments(output_dir="o", learning_rate=config.rate, num_train_epochs=5)
        self.trainer = Trainer(model=self.model, args=args, train_dataset=self.data["train"])

    def tokenize(self, rows):
        return self.tokenizer(rows["text"], truncation=True, max_length=64)

    def run(self):
        self.trainer.train()

    def report(self):
        print(self.trainer.evaluate(self.data["test"]))


experiment = Experiment(Config())
experiment.run()
experiment.report()
"""


def test_a_trainer_that_an_object_holds(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = moved("train.py", HELD)
    assert (run.model.source, run.optim.learning_rate, run.epochs, run.data.max_length) == ("acme/encoder", 1e-4, 5, 64)
    Path("moved.yaml").unlink()
    start = "        self.trainer.train()"
    for line in (
        "self.trainer.args.learning_rate = 1.0",
        "self.model.classifier.weight.data.zero_()",
        "self.model.requires_grad_(False)",
        "self.trainer.train()",
        "self.trainer.train_dataset = self.data['test']",
        "patch(self)",
    ):
        printed = refused("train.py", changed(HELD, (start, f"        {line}\n{start}")), capsys)
        assert line.partition("(")[0].partition(" = ")[0].rpartition(".")[2] in printed, line
    branch = (
        '        if input():\n            self.model = AutoModelForSequenceClassification.from_pretrained("acme/b")\n'
    )
    text = changed(HELD, ("        args = T", f"{branch}        args = T"))
    assert "self.model" in refused("train.py", text, capsys)


def test_a_script_of_images_is_refused_for_its_pixels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mapped = 'return tokenizer(rows["review"], truncation=True, max_length=256)'
    text = changed(TRAINER.replace("ARGUMENTS", USUAL), (mapped, 'return tokenizer(rows["image"])'))
    for name, other in (("ForSequence", "ForImage"), ("AutoTokenizer", "AutoImageProcessor")):
        text = text.replace(name, other)
    printed = refused("train.py", text, capsys)
    assert "data.map(tokenize, batched=True) (it makes the pixels" in printed
    assert "max_length" not in printed
