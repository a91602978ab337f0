"""`lockstep init --from` for scripts with a Trainer refuses what would change the training, and reads the rest."""

from pathlib import Path

import pytest

from lockstep.config.errors import RunError
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


def test_a_score_of_scikit_learn_has_the_name_of_lockstep(here: Path) -> None:
    text = TRAINER.replace("ARGUMENTS", USUAL.replace("'accuracy'", "'f1', greater_is_better=True"))
    text = text.replace("import numpy as np", "import numpy as np\nfrom sklearn.metrics import f1_score")
    score = 'f1 = f1_score(p.label_ids, np.argmax(p.predictions, -1), average="macro")\n    return {"f1": float(f1)}'
    text = changed(text, ('return {"accuracy": (np.argmax(p.predictions, -1) == p.label_ids).mean()}', score))
    for average, best in (('"macro"', "macro_f1"), ('"weighted"', "f1")):
        assert moved("train.py", text.replace('"macro"', average)).checkpoint.best == best


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
