"""`lockstep init --from` for scripts with a Trainer refuses what would change the training, and reads the rest."""

from pathlib import Path

import pytest

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
