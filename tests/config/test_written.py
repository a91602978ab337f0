"""No message or note treats a default as a key that the user wrote: over a grid of run files whose defaults conflict
with written keys, over the quick start, and, in tests/jobs/test_mistakes.py, over all common mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli import main
from lockstep.config.errors import RunError
from lockstep.config.run import QUICK_START, Run, load
from lockstep.config.written import applies, keys_of, naming_defaults, naming_lowered, with_defaults_named
from lockstep.data.job import Job
from lockstep.launchers.start import resolved
from support.marks import long
from support.messages import mentions, raises
from support.mistakes import RUN, prepare
from support.written_keys import accused, keys_written

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

# What a person wrote: little, so that much is a default.
SMALL: dict[str, Any] = {
    "data": {"train": "train.csv"},
    "model": {"type": "gpt2", "config": {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32}},
    "tokenizer": {"train": "bpe", "vocab_size": 300},
    "launch": {"processes": 2, "device": "cpu", "threads": 1},
}
STRATEGIES = ("single", "ddp", "fsdp2", "zero1", "zero3", "pipeline", "hf_accelerate", "hf_trainer")
OPTIMIZERS = ("adafactor", "lion", "sgd", "muon", "schedule_free", "adamw_8bit")
TASKS = (
    *("language_modeling", "masked_language_modeling", "token_classification", "question_answering", "translation"),
    *("summarization", "preference", "reward", "embedding", "image_classification"),
)
WRITTEN = [
    *(f"strategy.name={name}" for name in STRATEGIES),
    *(f"strategy.name={name} precision=fp16" for name in STRATEGIES),
    *(f"strategy.name={name} strategy.exact=portable" for name in STRATEGIES),
    *(f"optim.name={name}" for name in OPTIMIZERS),
    *(f"task.name={name}" for name in TASKS),
    *(f"launch.name={name}" for name in ("torchrun", "accelerate", "slurm", "tcp", "kubernetes", "sagemaker", "ray")),
    *("model.type=bert", "model.type=big_bird", "model.type=t5", "model.type=roberta", "model.dtype=bfloat16"),
    *(
        "batch_size=4",
        "micro_batches=256",
        "launch.processes=16",
        "launch.name=slurm launch.processes=auto",
        "launch.processes_per_gpu=2",
        "launch.device=cuda",
    ),
    *("evaluate.patience=3", "checkpoint.best=accuracy", "average.last=2", "sdc_check.every=2", "export=best"),
    *("launch.rebalance_every=2", "launch.replicate_every=2", "launch.on_rank_failure=continue", "data.stream=true"),
    *("data.workers=2", "data.limit=1", "data.test_fraction=0.5", "task.regression=true", "hub.push_to=me/mine"),
    *("strategy.all_reduce=hierarchical strategy.exact=false", "strategy.tensor_leaves=2", "model.compile=true"),
]


def said(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Return what `lockstep plan` prints about the run: errors and notes."""
    main(["plan", *words, "--offline"])
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    return "\n".join([*err.splitlines(), *(line for line in out.splitlines() if line.startswith("note: "))])


@pytest.mark.parametrize("words", WRITTEN)
def test_a_default_is_named_as_default(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(SMALL))
    text = said(["run.yaml", *words.split()], capfd)
    assert accused(text, keys_written(tmp_path / "run.yaml", words.split())) == []


def test_a_default_that_a_strategy_does_not_support_is_adapted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Evaluations of language models sample by default, but a pipeline decodes only greedily."""
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(SMALL))
    words = ["run.yaml", "task.name=language_modeling", "task.block_size=32", "strategy.name=pipeline"]
    words += ["task.text=text", "strategy.options.stages=2", "model.config.n_layer=2"]
    text = said(words, capfd)
    assert "note: task.temperature is 0" in text
    assert "its default is 0.8" in text
    _, job = resolved(load(words[0], words[1:]))
    assert job.run.task.model_dump()["temperature"] == 0
    assert not job.run.wrote("task.temperature")
    assert mentions(said([*words, "task.temperature=0.8"], capfd), "LS5131", "task.temperature=0")
    assert "greedily" not in said([*words, "task.samples=0"], capfd)


def test_a_written_value_that_is_the_default_is_known_from_the_file_of_the_output(tmp_path: Path) -> None:
    values = SMALL | {"data": {"train": "train.csv", "max_length": 128}, "output": str(tmp_path)}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    run = load(tmp_path / "mine.yaml", [])
    file = tmp_path / "run.yaml"
    file.write_text(run.dump())
    again = load(file, ["seed=3"])
    assert again.written_keys == run.written_keys | {"seed"}
    assert again.wrote("data.max_length")
    assert not again.wrote("batch_size")
    file.write_text(
        run.dump()
        .replace("max_length: 128", "max_length: 64")
        .replace(f"batch_size: {run.batch_size}", "batch_size: 9")
    )
    edited = load(file, [])
    assert edited.wrote("data.max_length")  # by the header
    assert edited.wrote("batch_size")  # it is another than the default
    file.write_text(run.dump().partition("\n")[2])
    assert not load(file, []).wrote("data.max_length")  # as a file without the header has it
    file.write_text(
        "# keys that you wrote; all others are defaults. Valid while the lines below have the SHA-256 1: {\n"
        + run.dump()
    )
    assert load(file, []).wrote("data.train")


BESIDE = [
    *("model.type=bert", "data.train=train.csv", "task.name=image_classification", "task.name=language_modeling"),
    *("tokenizer.train=character", "batch_size=2", "strategy.name=single", "optim.name=schedule_free"),
    *("optim.warmup_steps=4", "optim.schedule=[[0,1e-3],[100,0]]", "launch.processes=9", "launch.name=slurm"),
    *("steps=3", "model=./nowhere", "data.stream=true", "task.name=translation", "task.name=module"),
]
LIKE_THOSE = [
    *("data=train.csv", "task.name=language_modeling task.block_size=32", "strategy.name=pipeline", "optim.name=sgd"),
    *("launch.device=cpu", "tokenizer=./nowhere", "precision=fp16", "optim.schedule=constant"),
]


@pytest.mark.parametrize("words", [*BESIDE, *map(long, LIKE_THOSE)])
def test_written_keys_override_the_quick_start(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    (tmp_path / "run.yaml").unlink()
    monkeypatch.chdir(tmp_path)
    text = said(words.split(), capfd)
    assert accused(text, keys_written(None, words.split())) == []
    assert "both" not in text  # of two origins one is the quick start's


def test_the_control_a_written_key_is_refused() -> None:
    assert accused("lockstep: launch.processes: auto, and launch.gpus is not set", {"launch.gpus"})
    assert not accused("lockstep: launch.processes: auto, and launch.processes is not set", set())
    assert accused("lockstep: data.max_length: 128 tokens, but the model has 64", {"model.type"})
    assert not accused("lockstep: data.max_length: 128 tokens, but the model has 64", {"data.max_length"})
    assert accused("note: launch.processes_per_gpu has no effect on CPUs", set())


def test_own_data_replace_those_of_the_quick_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = load(None, ["data.train=train.csv"], QUICK_START)
    assert (run.data.source, run.data.train) == (None, "train.csv")
    assert load(None, ["model=some/model"], QUICK_START).optim.learning_rate == 5e-5  # of a pretrained one
    assert load(None, [], QUICK_START).data.source == "builtin/emotion"


def test_files_beside_the_built_in_data_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "run.yaml", "data.source=builtin/emotion"]) == 2
    assert mentions(capfd.readouterr().err, "LS2420", "data.train", "builtin/emotion", "data.source=null")
    assert main(["plan", "run.yaml", "data.train=null", "data.source=builtin/emotion", f"data.test={tmp_path}"]) == 2
    assert mentions(capfd.readouterr().err, "LS2250", "data.test", "is a folder", "*.jsonl")


def test_a_default_length_is_lowered_with_a_note_and_a_written_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(SMALL))
    text = said(["run.yaml"], capfd)
    assert "data.max_length is 32, because the model has positions for 32 tokens; its default is 128" in text
    assert resolved(load("run.yaml", []))[1].run.data.max_length == 32
    assert Job.of(load("run.yaml", [])).with_data().run.data.max_length == 32  # plan --simulate, sweep
    assert mentions(said(["run.yaml", "data.max_length=128"], capfd), "LS3142", "128", "32")
    text = said(["run.yaml", "task.name=language_modeling"], capfd)
    assert "task.block_size is 32" in text


def test_ranks_receive_the_list_of_written_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    job = resolved(load("run.yaml", ["evaluate.limit=5"]))[1]
    sent = Job.load(json.dumps(json.loads(job.dump())))
    assert sent.run.written_keys == job.run.written_keys
    assert sent.run.wrote("evaluate.limit")
    assert sent.run.wrote("model.config")
    assert not sent.run.wrote("launch.processes")


def test_in_a_file_with_all_defaults_only_differing_keys_are_written(tmp_path: Path) -> None:
    run = Run.load(SMALL | {"name": "a", "output": str(tmp_path / "a"), "batch_size": 128})
    assert run.wrote("batch_size")
    (tmp_path / "run.yaml").write_text(run.dump().partition("\n")[2])  # without the line that lists what was written
    again = load(tmp_path / "run.yaml", ["hub.private=true"])
    assert again == run
    assert again.wrote("launch.device")
    assert again.wrote("hub.private")  # on the command line
    assert not again.wrote("batch_size")  # as it would be by itself
    assert not again.wrote("optim")


@pytest.mark.parametrize("key", ["steps", "epochs"])
def test_overriding_the_length_of_an_output_writes_no_defaults(key: str, tmp_path: Path) -> None:
    run = load(None, [], SMALL | {"steps": 3})
    (tmp_path / "run.yaml").write_text(run.dump())
    assert load(tmp_path / "run.yaml", [f"{key}=5"]).written_keys == {*run.written_keys, key}


def test_a_message_names_the_default() -> None:
    run = Run.load(SMALL)
    assert with_defaults_named("data.max_length: too long [LS1234]", run) == (
        "data.max_length: too long (data.max_length is not set; 128 is its default) [LS1234]"
    )
    for text in ("launch.device: no [LS1234]", "nothing.known: no", "optim.name: missing", "hub.push_to: no token"):
        assert with_defaults_named(text, run) == text
    of_another = with_defaults_named("seed: none, and launch.gpus is not set", run)
    assert of_another.endswith("(seed is not set; 0 is its default)")
    assert not applies("hub.private has no effect without hub.push_to", run)
    assert applies("launch.processes has no effect here", run)


def test_a_message_names_the_adapted_default_and_why() -> None:
    note = "data.max_length is 8, because the model has positions for 8 tokens; its default is 128"
    for text in ("data.max_length: too short", "task: 8 tokens of data.max_length are few"):
        with raises("LS1234", text, f"({note})") as caught, naming_defaults(Run.load(SMALL)), naming_lowered([note]):
            raise RunError("LS1234", text)
        assert "128 is its default" not in str(caught.value)
    with raises("LS1234", "data.max_length_of: no") as caught, naming_lowered([note]):
        raise RunError("LS1234", "data.max_length_of: no")
    assert note not in str(caught.value)


def test_pairs_of_few_examples_call_the_default_of_micro_batches_one() -> None:
    embedding = SMALL | {"task": "embedding", "batch_size": 8}
    with raises("LS1119", "8 micro-batches (the default of micro_batches)", "set micro_batches to 4 or less"):
        Run.load(embedding)
    with raises("LS1119", "in 8 micro-batches leave"):
        Run.load(embedding | {"micro_batches": 8})


def test_no_overrides_add_no_written_key() -> None:
    assert "" not in keys_of({}, {"data": {"train": "a.csv"}, "hub": {}})
