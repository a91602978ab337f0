"""Names of other systems, misplaced keys, and short forms of sections are explained or accepted."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli import main
from lockstep.config import error_messages, plugins
from lockstep.config.key_aliases import foreign_names, without_counterpart
from lockstep.config.run import Run, RunError, load, schema
from lockstep.lab.import_config import trainer
from support.documents import chapters
from support.messages import mentions, raises

FOREIGN = foreign_names()
KEYS = {*error_messages.keys_of(Run)}
for kind, part in (("tasks", "task"), ("launchers", "launch"), ("optimizers", "optim")):
    for each in plugins.names(kind):
        KEYS |= {f"{part}.{key}" for key in plugins.find(kind, each).Options.model_fields}  # type: ignore[attr-defined]
PAGE = chapters("reference/coming-from")
SMALL: dict[str, Any] = {"data": {"source": "builtin/emotion"}, "model": {"type": "gpt2"}}


def said(*overrides: str, values: dict[str, Any] | None = None) -> str:
    with pytest.raises(RunError) as caught:
        load(None, list(overrides), SMALL | (values or {}))
    return str(caught.value)


def test_every_foreign_name_maps_to_an_existing_key() -> None:
    ours = error_messages.keys_of(Run)
    assert {key for key, _ in FOREIGN.values()} - {""} <= ours.keys()
    own = {key.rpartition(".")[2] for key in ours}
    assert not own & FOREIGN.keys(), "a key of ours would be explained as foreign"
    assert len(FOREIGN) >= 40


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_foreign_key_names_are_explained_without_a_guess(name: str) -> None:
    key, told = FOREIGN[name]
    for where in (name, f"task.{name}"):
        message = said(f"{where}=3")
        assert "did you mean" not in message
        assert told in message
        assert f"it is {key!r} here" in message if key else "it is ''" not in message


@pytest.mark.parametrize("name", sorted(trainer.TABLE))
def test_every_field_of_training_arguments_is_answered(name: str) -> None:
    """Each field has our key, or a reason why there is none; a field with the same name here has its section."""
    if name in Run.model_fields:
        return
    message = said(f"{name}=3")
    ours = [key for key in error_messages.keys_of(Run) if key.rpartition(".")[2] == name]
    assert "did you mean" not in message
    assert "keys are" not in message
    if name in FOREIGN:
        assert FOREIGN[name][1] in message
    elif ours:
        assert f"it is {ours[0]!r} " in message
    else:
        assert f"it has no counterpart here: {trainer.TABLE[name].how}" in message


def test_the_page_has_the_names() -> None:
    page = PAGE.partition("\n## Names in a run file\n")[2].partition("\n## ")[0]
    rows = [
        f"| `{name}` | {f'`{key}`' if key else 'nothing to set'} | {told} |" for name, (key, told) in FOREIGN.items()
    ]
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows
    assert not without_counterpart().keys() & FOREIGN.keys()


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("learning_rate=1", "it is 'optim.learning_rate' here"),
        ("every=3", "it is 'evaluate.every' here or 'checkpoint.every' here or 'sdc_check.every' here or"),
        ("model.precision=bf16", "it is 'precision' here"),
        ("task.beams=4", "it is a key of runs with task.name: summarization, translation"),
        ("block_size=64", "it is 'task.block_size' with task.name: language_modeling"),
        ("launch.partition=gpu", "it is a key of runs with launch.name: slurm"),
        ("track.report_to=wandb", "it is 'track.to' here"),
        ("learning_rte=1", "did you mean 'optim.learning_rate'?"),
        ("launch.machine=2", "keys of launch are name, "),
        ("strategy.gather=step", "tensor_leaves; an option of the engine would be 'strategy.options.gather'"),
        ("optim.learning_rat=1", "did you mean 'learning_rate'?"),
        ("data.types.a=null", "data.types.a: invalid value null; expected 'text', 'integer' or 'number' ("),
        ("optim.betas=[2, 3]", "optim.betas: invalid value 2; expected a number less than 1 ("),
        ("size=1", "keys are name, output, remote_dir, seed"),  # like batch_size by half: no guess
        (
            "training={lr: 1, eval_steps: 4, x: 1}",
            "no such section; about its keys: 'lr': it is 'optim.learning_",
        ),
    ],
)
def test_exact_names_anywhere_come_before_any_guess(override: str, wanted: str) -> None:
    if override.startswith("launch.machine"):  # beside it, where the launcher has machines
        assert "did you mean 'machines'" in said(override, "launch.name=torchrun")
    else:
        assert wanted in said(override)


def test_key_suggestions_ignore_hyphens_and_capitals(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: builtin/emotion\nmodel: {type: gpt2}\nLearning-Rate: 1\n")
    with raises("LS1000", "'optim.learning_rate'", "run.yaml", "line 3"):
        load(path, [])


SHORT = """\
task: classification
data: builtin/emotion
model: gpt2
tokenizer: bert-base-uncased
optim: sgd
strategy: fsdp2
launch: torchrun
track: wandb
precision: bfloat16
"""
LONG = """\
task: {name: classification}
data: {source: builtin/emotion}
model: {source: gpt2}
tokenizer: {source: bert-base-uncased}
optim: {name: sgd}
strategy: {name: fsdp2}
launch: {name: torchrun}
track: {to: [wandb]}
precision: bf16
"""


def test_text_is_short_form_of_a_section(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SHORT)
    short = load(tmp_path / "run.yaml", [])
    (tmp_path / "run.yaml").write_text(LONG)
    assert short == load(tmp_path / "run.yaml", []) == Run.load(yaml.safe_load(SHORT), {"name": "run"})
    assert short == load(tmp_path / "run.yaml", ["epochs=1", *SHORT.replace(": ", "=").split(), "epochs=3"])
    assert "strategy:\n  name: fsdp2\n" in short.dump()
    assert "to:\n  - wandb\n" in short.dump()


def test_a_path_as_short_form_of_a_section_is_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts.csv").write_text("text,label\nx,1\n")
    (tmp_path / "run.yaml").write_text("data: texts.csv\nmodel: {type: gpt2}\n")
    monkeypatch.chdir("/")
    assert load(tmp_path / "run.yaml", []).data.source == str(tmp_path / "texts.csv")


def test_a_short_override_sets_one_key_and_leaves_the_others() -> None:
    values = SMALL | {"strategy": {"name": "ddp", "exact": False}, "track": {"every": 7}}
    run = load(None, ["strategy=fsdp2", "track=tensorboard,wandb"], values)
    assert (run.strategy.name, run.strategy.exact) == ("fsdp2", False)
    assert (run.track.to, run.track.every) == (["tensorboard", "wandb"], 7)
    after = load(None, ["strategy=fsdp2", "strategy.exact=false"], SMALL)
    assert (after.strategy.name, after.strategy.exact) == ("fsdp2", False)
    written = load(None, ["strategy.exact=false", "track.every=3"], SMALL | {"strategy": "fsdp2", "track": ["wandb"]})
    assert (written.strategy.name, written.strategy.exact, written.track.to) == ("fsdp2", False, ["wandb"])


def test_an_invalid_short_form_is_refused() -> None:
    assert "strategy.name: unknown strategy 'deepsped'" in said("strategy=deepsped")
    assert mentions(said("model=gpt2"), "LS1135")  # beside type: which of the two is not guessed
    assert mentions(said("model=5"), "LS1002", "model", "5")
    assert mentions(said("precision=fp8"), "LS1002", "'fp8'", "'fp32'", "'bf16'", "'fp16'")


def test_the_schema_accepts_valid_run_files() -> None:
    found = pytest.importorskip("jsonschema").Draft202012Validator(schema())
    whole = load(None, ["track=wandb"], SMALL)
    for text in (SHORT, LONG, whole.dump(), SHORT.replace("wandb", "[wandb, mlflow]"), SHORT.replace("bfloat16", "32")):
        load(None, [], yaml.safe_load(text))
        assert not list(found.iter_errors(yaml.safe_load(text)))
    for text in (SHORT.replace("gpt2", "5"), LONG + "eval_steps: 3", SHORT.replace("bfloat16", "fp8")):
        with pytest.raises(RunError):
            load(None, [], yaml.safe_load(text))
        assert list(found.iter_errors(yaml.safe_load(text)))


# -- what the page denies --------------------------------------------------------------------------------------------

# What a name is about -> the key that there is for it: a row that says there is none names it all the same.
THERE_IS = {
    r"dynamo|compile$": "model.compile",
    r"(activation|gradient)_checkpointing$": "model.checkpoint_activations",
    r"offload": "model.offload_activations",
    r"stream": "data.stream",
    r"freez|frozen": "model.freeze",
    r"^rl$|reward|^pref_(?!ftx)": "task.",
    r"early_stopping": "evaluate.patience",
    r"(^|_)ema(_|$)": "average.ema",
}
SECTIONS = sorted(set(re.findall(r"^## (.*)$", PAGE, re.M)) - {"Names in a run file"})


def denied(section: str) -> dict[str, str]:
    """Return the names without a counterpart, and the reasons, from the page."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found, columns = {}, 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]] if line.startswith("|") else []
        columns = len(cells) if cells[:1] == ["theirs"] else columns
        if cells and (columns == 2 or cells[1] == "none"):
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells[-1])
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_does_not_deny_existing_keys(section: str) -> None:
    ours = set(KEYS)
    for name, why in denied(section).items():
        last = name.rpartition(".")[2]
        assert FOREIGN.get(last, ("", ""))[0] in why, f"{section}: {name} is {FOREIGN.get(last)}, and it says: {why}"
        for form, key in THERE_IS.items():
            assert not re.search(form, last) or key in why or "ppo" in why, (
                f"{section}: {name} is {key}, and the page says: {why}"
            )
        named = set(re.findall(r"\b(?:task|data|model|optim|launch|evaluate|checkpoint|average)\.\w+", why))
        assert not {key for key in named if key not in ours and f"{key}s" not in ours}, (name, why)


@pytest.mark.parametrize("name", ["preload", "init_from", "pretrained", "load_from", "warm_start", "model.preload"])
def test_initial_weights_are_found_by_common_names(name: str) -> None:
    with raises("LS1000", "'model.source'", "OUTPUT/checkpoints/step-N", "lockstep branch"):
        load(None, [f"{name}=x"], {"data": "x.csv", "model": "y"})


def test_deepspeed_and_resume_keys_are_explained(capfd: pytest.CaptureFixture[str]) -> None:
    with raises("LS1121", "'zero1' or 'zero2' or 'zero3'"):
        load(None, ["strategy=deepspeed"], {"data": "x.csv", "model": "y"})
    for name, nearest in {
        "strategy=DeepSpeed_Zero-2": "'zero2'? ",
        "strategy=tp": "'fsdp2'? ",
        "launch=k8s": "'kubernetes'? ",
        "task=Reward-Modeling": "'reward'? ",
    }.items():
        with raises("LS1121" if name.startswith("strategy") else "LS1098", f"did you mean {nearest}known are"):
            load(None, [name], {"data": "x.csv", "model": "y"})
    for flag, hint in {"--fp16": "'precision'", "--data.deduplicate": "data.deduplicate=VALUE"}.items():
        assert main(["train", "run.yaml", flag]) == 2
        assert mentions(capfd.readouterr().err, "LS0010", hint)
    with raises("LS1000", "newest checkpoint", "lockstep branch OUTPUT@N"):
        load(None, ["resume=true"], {"data": "x.csv", "model": "y"})
    words = {"resume": "resumes", "eval": "evaluate", "generate": "predict", "upload": "push"}
    words |= {"kill": "stop", "tune": "sweep", "convert": "--from", "ls": "lockstep list", "-v": "--version"}
    for word, wanted in (words | {"help": "COMMAND --help", "my.yaml": "lockstep train my.yaml"}).items():
        assert main([word, "out"]) == 2
        assert mentions(capfd.readouterr().err, "LS8420", wanted)


def test_hints_name_what_exists(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An unknown flag is no key of the run file, and a file of another kind is no run file."""
    hints = {"--dry-run": "`lockstep plan` checks", "--epoch": ": epochs=VALUE;", "--deduplicate": "'data.deduplicate'"}
    for flag, hint in (hints | {"--force": "'--force'; see lockstep"}).items():
        assert main(["train", "run.yaml", flag]) == 2
        assert mentions(capfd.readouterr().err, "LS0010", hint)
    for words in (["--config", "a.yaml"], ["--config=a.yaml"], ["-c", "a.yaml"]):
        assert main(["plan", *words]) == 2
        assert mentions(capfd.readouterr().err, "LS8421", "lockstep plan a.yaml")
    for name, hint in {"rows.jsonl": "--data", "train.py": "--from"}.items():
        (tmp_path / name).write_text("{}")
        assert main(["train", str(tmp_path / name)]) == 2
        assert mentions(capfd.readouterr().err, "LS1148", f"{hint} {tmp_path / name}")
    (tmp_path / "run.yaml").write_text("")
    assert main(["train", str(tmp_path)]) == 2
    assert mentions(capfd.readouterr().err, "LS1105", f"the folder holds a run file: {tmp_path / 'run.yaml'}")


def test_names_of_devices_and_of_kinds_of_training() -> None:
    assert load(None, ["launch.device=gpu"], SMALL).launch.device == "cuda"
    assert "did you mean 'fsdp2' or 'pipeline'?" in said("strategy=megatron")
    assert "did you mean 'zero1' or 'zero2' or 'zero3'?" in said("strategy=zero")
    assert "did you mean 'summarization' or 'translation'?" in said("task=seq2seq")


def test_a_key_of_another_task_is_no_hint() -> None:
    assert "keys of task are name, words, tags" in said("task.name=token_classification", "task.tokens=x")
