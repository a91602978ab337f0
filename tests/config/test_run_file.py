"""The run file: which files are accepted, and the messages about others."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lockstep.config.output_files import check_output
from lockstep.config.run import Run, RunError, load, schema
from lockstep.data.job import arithmetic_of
from support.messages import mentions, raises

GOOD = """\
name: emotion
data: {source: dair-ai/emotion, max_length: 128}
model: {source: gpt2}
epochs: 3
optim:
  learning_rate: 5e-5
  schedule: linear
"""

CONTRACT = """\
name: emotion
output: outputs/emotion
seed: 0
task: {name: classification, text: text, label: label}
data: {source: dair-ai/emotion, max_length: 128}
model: {source: gpt2}
tokenizer: {source: gpt2}
epochs: 3
batch_size: 128
micro_batches: 8
precision: fp32
optim: {learning_rate: 5.0e-5, schedule: linear, warmup_steps: 50, weight_decay: 0.01, max_grad_norm: 1.0}
strategy: {name: ddp, exact: true, options: {}}
launch: {name: local, processes: auto}
evaluate: {every: 200}
checkpoint: {every: 200, keep: 2}
track: {to: [tensorboard]}
hub: {push_to: null}
"""


def read(tmp_path: Path, text: str, *overrides: str) -> Run:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load(path, list(overrides))


def said(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RunError) as caught:
        read(tmp_path, text, *overrides)
    return str(caught.value)


def test_defaults_and_overrides(tmp_path: Path) -> None:
    run = read(
        tmp_path, GOOD, "optim.max_grad_norm=0.5", "--seed=3", "strategy.name=allreduce", "model.config.n_layer=2"
    )
    assert (run.optim.learning_rate, run.optim.max_grad_norm, run.seed, run.strategy.name) == (
        5e-5,
        0.5,
        3,
        "allreduce",
    )
    assert run.model.config == {"n_layer": 2}
    assert str(run.folder) == "outputs/emotion"
    assert (run.batch_size, run.micro_batches, run.strategy.exact) == (128, 8, True)


def test_the_documented_example_is_a_run_file(tmp_path: Path) -> None:
    run = read(tmp_path, CONTRACT)
    assert run.track.to == ["tensorboard"]
    own = {"text": "text", "text_pair": None, "label": "label", "label_names": None, "samples": 3}
    assert own.items() <= run.task.options.items()


def test_a_dumped_run_can_be_loaded(tmp_path: Path) -> None:
    run = read(tmp_path, CONTRACT, "steps=7")
    again = read(tmp_path, run.dump())
    assert again == run
    assert again.epochs is None


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("batchsize: 3", ["unknown key 'batchsize'", "'batch_size'", "run.yaml, line 8"]),
        ("optimizer: {}", ["unknown key 'optimizer'", "'optim'"]),
        ("batch_size: many", ["batch_size", "'many'", "integer", "line 8"]),
        ("batch_size: 0", ["batch_size", "0", "greater than or equal to 1"]),
        ("precision: fp8", ["precision", "'fp8'", "'fp32', 'bf16' or 'fp16'"]),
        ("micro_batches: 256", ["micro_batches (256)", "batch_size (128, its default)"]),
        ("steps: 5", ["epochs", "steps", "LS1102"]),
        ("task: {name: clasification}", ["task.name", "did you mean 'classification'", "line 8"]),
        ("task: {txt: tweet}", ["unknown key 'task.txt'", "'text'"]),
        ("task: {text: 5}", ["task.text", "5"]),
        ("strategy: {name: dpp}", ["strategy.name", "'dpp'", "ddp", "line 8"]),
        ("strategy: {exakt: false}", ["unknown key 'strategy.exakt'", "'exact'"]),
        ("launch: {name: nowhere}", ["launch.name", "'nowhere'", "local"]),
        ("launch: {processes: 0}", ["launch.processes", "0"]),
        ("launch: {processes: some}", ["launch.processes", "'some'", "auto"]),
        ("track: {to: [tensorbord]}", ["track.to", "'tensorbord'", "tensorboard"]),
        ("tokenizer: {source: a, train: bpe}", ["tokenizer", "line 8", "LS1133"]),
        ("data: [1]", ["data", "line 8"]),
        ("hub: {token: hf_abcdefghijklmnopqrstuvwxyz}", ["hub.token", "secret", "environment"]),
        ("output: hf_abcdefghijklmnopqrstuvwxyz0123", ["output", "secret"]),
    ],
)
def test_bad_values_are_named_with_key_value_remedy_and_line(tmp_path: Path, change: str, wanted: list[str]) -> None:
    message = said(tmp_path, GOOD + change)
    for part in wanted:
        assert part in message, message
    assert "Traceback" not in message


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    assert "data: missing" in said(tmp_path, "model: {source: gpt2}")
    assert "either source" in said(tmp_path, "data: {source: x}\nmodel: {}")


def test_several_mistakes_are_one_message(tmp_path: Path) -> None:
    message = said(tmp_path, GOOD + "seeed: 1\nbatch_size: -1\n")
    assert "seeed" in message
    assert "batch_size" in message


def test_errors_in_overrides_name_the_command_line(tmp_path: Path) -> None:
    assert "on the command line" in said(tmp_path, GOOD, "batch_size=-1")
    assert "key=value" in said(tmp_path, GOOD, "batch_size")


BASE = "data: {source: builtin/emotion}\nmodel: {type: gpt2}\nbatch_size: 64\nmicro_batches: 8\n"


@pytest.mark.parametrize(
    ("text", "overrides", "wanted"),
    [
        (BASE, ["batch_size=4"], " (on the command line) [LS1103]"),
        (BASE.replace("64", "4"), ["seed=1"], " (FILE) [LS1103]"),
        (BASE, ["model.source=x"], "and not both (on the command line)"),
        (BASE.replace("type:", "source: x, type:"), ["model.attention=eager"], "and not both (FILE, line 2)"),
        (BASE + "task: {name: language_modeling, prompt: x}\n", ["task.text=y"], "or neither (FILE, line 5)"),
        (BASE + "task: {name: language_modeling}\n", ["task.prompt=y"], "or neither (on the command line)"),
        (BASE + "task: {txt: x}\n", ["task.text=y"], "did you mean 'text'? (FILE, line 5)"),
        (BASE + "track: {to: [tensorbord]}\n", ["track.every=3"], "wandb (FILE, line 5)"),
        (BASE, ["hub.token=hf_abcdefghijklmnopqrstuvwx"], "hub.token (on the command line) looks like a secret"),
        (BASE + "output: hf_abcdefghijklmnopqrstuvwx\n", ["seed=1"], "output (FILE) looks like a secret"),
    ],
)
def test_errors_name_their_origin(tmp_path: Path, text: str, overrides: list[str], wanted: str) -> None:
    path = tmp_path / "run.yaml"
    assert wanted.replace("FILE", str(path)) in said(tmp_path, text, *overrides)
    values = dict(override.split("=", 1) for override in overrides)  # the same from Python
    with pytest.raises(RunError) as caught:
        Run.load(path, {key: yaml.safe_load(value) for key, value in values.items()})
    assert wanted.replace("FILE", str(path)).replace("on the command line", "in the overrides") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("seed: x", "seed: invalid value 'x'; expected an integer (FILE, line 8)"),
        ("optim: {betas: [0.9]}", "optim.betas: invalid value [0.9]; expected 2 values"),
        ("optim: {betas: [0.9, 1.5]}", "optim.betas: invalid value 1.5; expected a number less than 1"),
        ("steps: true", "steps: invalid value true; expected an integer"),
        ("optim: {learning_rate: .inf}", "optim.learning_rate: invalid value inf; expected a"),
        (
            "batch_size: null",
            "batch_size: invalid value null; expected an integer; leave the key out for its default, 128",
        ),
        ("launch: {processes: null}", "null; expected an integer or 'auto'; leave the key out for its default, auto ("),
        ("optim: {betas: [1, 2, 3]}", "optim.betas: invalid value [1, 2, 3]; expected 2 values"),
        ("optim: {name: sgd, momentum: 1}", "optim.momentum: invalid value 1; expected a number less than 1 ("),
        (
            "data: {source: x, train: [5]}",
            "data.train: invalid value [5]; expected a text or a list of texts: YAML reads",
        ),
        ("max_time: 3 hours", "time after which to save and stop"),
        ("max_time: 0h0.0s", "max_time: 0h0.0s leaves no time to train"),
        ("launch: {processes: 1.5}", "launch.processes: invalid value 1.5; expected an integer or 'auto' ("),
        (
            "task: {label_names: [1]}",
            "task.label_names: invalid value 1; expected a text: YAML reads it as a number unless it is in quotes (",
        ),
        (
            "task: {label_names: [no, yes]}",
            "invalid value false; expected a text: YAML reads yes, no, on and off as true or",
        ),
        (
            "output: on",
            "output: invalid value true; expected a text without control characters (default: outputs/NAME): YAML",
        ),
        ("model: {type: x, trust_remote_code: maybe}", "invalid value 'maybe'; expected true or false ("),
        ("evaluate: 3", "evaluate: invalid value 3; expected a mapping of keys ("),
    ],
)
def test_errors_describe_valid_values(tmp_path: Path, change: str, wanted: str) -> None:
    key = change.partition(":")[0]
    kept = [line for line in (BASE + "#\n#\n#\n").splitlines() if not line.startswith(f"{key}:")]
    message = said(tmp_path, "\n".join([*kept, change]))
    assert wanted.replace("FILE", str(tmp_path / "run.yaml")) in message
    assert not {"input", "valid", "dictionary", "instance", "parse", "string", "boolean", "tuple"} & set(
        message.split()
    )


DEEP = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 60))
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (BASE + "batch_size: 3\n", "line 5, column 1: the key 'batch_size' occurs twice, first on line 3"),
        (
            BASE + "optim: {max_grad_norm: 1, 'max_grad_norm': 2}\n",
            "line 5, column 27: the key 'max_grad_norm' occurs twice",
        ),
        (BASE + "a: &a [*a]\n", "line 5, column 8: the alias 'a' refers to itself"),
        (LAUGHS, "aliases expand to more than 100000 values"),
        (DEEP, "aliases expand to more than 100000 values or 40 levels"),
        ("a: " + "[" * 5000, "nested more than 40 levels deep"),
        ("a: 'x", "line 1, column 6: while scanning a quoted scalar, found unexpected end of stream"),
    ],
)
def test_yaml_that_would_be_misread_or_grow_without_end_is_refused(tmp_path: Path, text: str, wanted: str) -> None:
    message = said(tmp_path, text)
    assert mentions(message, "LS1106", str(tmp_path), "/run.yaml")
    assert wanted in message
    with raises("LS1114", "'max_grad_norm'"):
        load(None, ["optim={max_grad_norm: 1, max_grad_norm: 2}"], {})


def test_aliases_can_be_used(tmp_path: Path) -> None:
    run = read(tmp_path, BASE + "task: {label_names: &n [a, b]}\nhub: {tags: *n}\n")
    assert run.hub.tags == run.task.options["label_names"] == ["a", "b"]


def test_bad_files(tmp_path: Path) -> None:
    assert mentions(said(tmp_path, "name: ["), "LS1106")
    assert mentions(said(tmp_path, "- 1"), "LS1107")
    assert mentions(said(tmp_path, ""), "LS1107")
    with raises("LS1105"):
        load(tmp_path / "none.yaml", [])


def test_arithmetic_omits_keys_that_cannot_change_bits(tmp_path: Path) -> None:
    base = arithmetic_of(read(tmp_path, GOOD))
    same = [
        "launch.processes=3",
        "strategy.name=allreduce",
        "checkpoint.every=7",
        "track.to=[tensorboard]",
        "name=other",
    ]
    assert arithmetic_of(read(tmp_path, GOOD, *same)) == base
    for change in (
        "seed=1",
        "micro_batches=4",
        "optim.max_grad_norm=2",
        "precision=bf16",
        "strategy.exact=false",
        "data.limit=5",
    ):
        assert arithmetic_of(read(tmp_path, GOOD, change)) != base, change


def test_the_schema_describes_every_key() -> None:
    found = schema()
    assert found["additionalProperties"] is False
    assert set(yaml.safe_load(CONTRACT)) <= set(found["properties"])


def test_a_read_only_file_system_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.load({"data": {"train": "a.csv"}, "model": "gpt2", "output": str(tmp_path / "out")})
    monkeypatch.setattr(os, "access", lambda *_: False)
    for flag, why in ((os.ST_RDONLY, "file system is read-only"), (0, "this user has no permission")):
        monkeypatch.setattr(os, "statvfs", lambda _, flag=flag: SimpleNamespace(f_flag=flag))
        with raises("LS1116", why, str(tmp_path)):
            check_output(run.folder)


def test_paths_of_an_outputs_run_file_equal_those_of_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are relative to the folder in which training was started, wherever a later command is given."""
    output, neighbour = tmp_path / "job/runs/out", tmp_path / "neighbour"
    for folder in (output, tmp_path / "job/minilm", neighbour, neighbour / "minilm"):
        folder.mkdir(parents=True)
    (output / "run.yaml").write_text(GOOD.replace("gpt2", "./minilm").replace("name: e", "output: runs/out\nname: e"))
    for place, path in (("job", "./minilm"), ("neighbour", "../job/minilm"), ("job/runs/out", "../../minilm")):
        monkeypatch.chdir(tmp_path / place)
        run = load(os.path.relpath(output / "run.yaml"), [])
        assert Path(str(run.model.source)).resolve() == Path(path).resolve() == tmp_path / "job/minilm"
    (output / "other.yaml").write_text((output / "run.yaml").read_text())
    monkeypatch.chdir(neighbour)
    assert load(output / "other.yaml", []).model.source == "./minilm"
