"""Exports damaged after they were written: predict, evaluate, push and model.source refuse them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lockstep.checkpoint import export_hashes
from lockstep.checkpoint.hub_push import push
from lockstep.cli import main
from lockstep.config.run import Run, load
from lockstep.data import hub, tokenizer
from lockstep.tasks.models import models
from lockstep.tasks.models.model_configs import ModelChoice
from lockstep.training.checkpoint_model import fetch
from lockstep.training.evaluate_export import finished
from lockstep.training.predicting import predictions
from support.harness import TINY, tiny
from support.messages import mentions, raises


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a finished run."""
    folder = tmp_path_factory.mktemp("sound")
    keys = ["launch.processes=1", "strategy.name=single", "micro_batches=2", "steps=2"]
    run = load(None, keys, TINY | {"output": str(folder / "out")})
    (folder / "run.yaml").write_text(run.dump())
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder / "out"


@pytest.fixture
def output(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "out", symlinks=True)
    return tmp_path / "out"


def fetched(run: Run) -> list[str]:
    return fetch(run.model, run.tokenizer)


def turned(folder: Path) -> None:
    """Flip the signs of one tensor, in a file of the same size."""
    path = folder / "export" / "model.safetensors"
    tensors = load_file(path)
    name = next(iter(sorted(tensors)))
    tensors[name] = -tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


def text(name: str, content: str | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.unlink() if content is None else path.write_text(content)

    return change


def cut(folder: Path) -> None:
    os.truncate(folder / "export" / "model.safetensors", 200)


DAMAGE = {
    "signs": (turned, "model.safetensors"),
    "cut": (cut, "model.safetensors"),
    "no weights": (text("export/model.safetensors", None), "model.safetensors"),
    "no config": (text("export/config.json", None), "config.json"),
    "broken config": (text("export/config.json", "{"), "config.json"),
    "broken tokenizer": (text("export/tokenizer.json", "{"), "tokenizer.json"),
    "no tokenizer": (text("export/tokenizer.json", None), "tokenizer.json"),
    "no hashes": (text("export.json", None), "export.json"),
    "none of them": (text("export.json", "{}"), "export.json"),
    "a list": (text("export.json", "[]"), "export.json"),
}


def uses(output: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], object]]:
    """Return everything that reads an export, by the name of its command or key."""
    monkeypatch.setenv("HF_TOKEN", "hf_none")

    def source(where: Path, key: str = "model") -> Run:
        return tiny(**{key: {"source": str(where)}}) if key == "model" else tiny(tokenizer={"source": str(where)})

    return {
        "predict": lambda: list(predictions(output, ["some text"], {})),
        "evaluate": lambda: finished(output, []),
        "push": lambda: push(output, "someone/model", True, print),
        "model.source: OUT": lambda: fetched(source(output)),
        "model.source: OUT/export": lambda: fetched(source(output / "export")),
        "tokenizer.source": lambda: fetched(source(output, "tokenizer")),
    }


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_export_is_refused_by_all_that_use_it(
    kind: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, name = DAMAGE[kind]
    for use in uses(output, monkeypatch).values():
        export_hashes.require_whole(output)  # from here on, the result of the check is cached
        kept = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
        change(output)
        with raises("LS6130", name):
            use()
        for path, content in kept.items():
            path.write_bytes(content)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_json_that_transformers_cannot_read_is_one_message(
    name: str, output: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Invalid JSON in files that users may edit, whose hashes are not compared, gives one message."""
    (output / "export" / name).write_text('{"no": "model"}')
    assert main(["predict", str(output), "some text"]) == 2
    error = capfd.readouterr().err
    assert mentions(error, "LS3430", str(output / "export"))
    assert "Traceback" not in error


def test_sizes_that_the_weights_do_not_have_are_one_message(output: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = output / "export/config.json"
    config = json.loads(path.read_text())
    size = next(name for name in ("hidden_size", "n_embd") if name in config)
    layers = next(name for name in ("num_hidden_layers", "n_layer") if name in config)
    for changed, code in [({size: config[size] * 2}, "LS3494"), ({layers: config[layers] - 1}, "LS3495")]:
        path.write_text(json.dumps(config | changed))
        assert main(["predict", str(output), "some text"]) == 2
        error = capfd.readouterr().err
        assert mentions(error, code, str(output / "export"), "config.json")
        assert "above" not in error


def test_a_healthy_export_is_used_and_read_once(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    honest = export_hashes.sha256_of

    def reading(path: Path) -> str:
        if path.suffix != ".json":  # JSON files are small, and read each time for the note on edits
            read.append(path.name)
        return honest(path)

    monkeypatch.setattr(export_hashes, "sha256_of", reading)
    (answer,) = predictions(output, ["some text"], {})
    assert answer["label"]
    first = list(read)
    assert "model.safetensors" in first
    finished(output, [])
    fetched(tiny(model={"source": str(output / "export")}))
    assert read == first
    os.utime(output / "export" / "model.safetensors")
    finished(output, [])
    assert read == first + first


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_edited_labels_and_tokens_are_noted(command: str, output: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Edited label names and tokens are noted: wrong answers would give no sign of them."""
    words = [command, str(output), *(["some text", "--json"] if command == "predict" else ["--json"])]
    assert main(words) == 0
    assert "note: changed since the run wrote" not in capfd.readouterr().err
    path = output / "export" / "config.json"
    config = json.loads(path.read_text())
    names = config["id2label"]
    names["0"], names["1"] = names["1"], names["0"]
    path.write_text(json.dumps(config))
    assert main(words) == 0
    out, err = capfd.readouterr()
    assert f"changed since the run wrote them: config.json in {output / 'export'}" in err
    assert json.loads(out)


def test_an_edited_card_or_config_is_used_and_noted(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("README.md", "config.json"):
        with open(output / "export" / name, "a") as file:
            file.write("\n")
    (output / "export" / "adapter_config.json").write_text("{}")  # `from_pretrained` reads it where it is
    finished(output, [])
    added = "not written by the run: adapter_config.json"
    wanted = f"changed since the run wrote them: config.json; {added} in {output / 'export'}"
    for where in (output, output / "export"):
        assert wanted in fetched(tiny(model={"source": str(where)}))[0]
    for words in (["status", str(output), "--verify"], ["attest", str(output)]):
        assert main(words) == 0
        assert wanted in " ".join(capsys.readouterr().out.split())
    monkeypatch.delenv("HF_TOKEN", raising=False)
    said: list[str] = []
    with raises("LS6015", "someone/model"):
        push(output, "someone/model", True, said.append)
    assert wanted in said[0]


def test_an_edited_index_of_shards_is_damage(output: Path) -> None:
    """The index says which files hold the weights."""
    index, record = output / "export" / "model.safetensors.index.json", output / export_hashes.FILE
    index.write_text('{"weight_map": {"a": "model.safetensors"}}')
    record.write_text(json.dumps({**json.loads(record.read_text()), index.name: export_hashes.sha256_of(index)}))
    export_hashes.require_whole(output)
    index.write_text('{"weight_map": {}}')
    with raises("LS6130", index.name):
        export_hashes.require_whole(output)


def test_a_folder_that_is_no_run_is_not_checked(output: Path, tmp_path: Path) -> None:
    shutil.copytree(output / "export", tmp_path / "plain" / "export")
    fetched(tiny(model={"source": str(tmp_path / "plain" / "export")}))
    turned(tmp_path / "plain")
    fetched(tiny(model={"source": str(tmp_path / "plain" / "export")}))


def test_a_model_folder_without_weights_is_one_message(output: Path, tmp_path: Path) -> None:
    shutil.copytree(output / "export", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    run = tiny(model={"source": str(tmp_path / "model")})
    with raises("LS2430", str(tmp_path / "model"), "model.safetensors"):
        models.build(ModelChoice.of(run), "classification", tokenizer.load(str(tmp_path / "model")))


def gone(folder: Path) -> None:
    """Delete the export, as a run that never wrote one; `model.source` then does not take its name for a Hub id."""
    shutil.rmtree(folder / "export")
    with raises("LS2080", "export was deleted", "lockstep train again"):
        hub.model_folder(str(folder / "export"))


@pytest.mark.parametrize("fault", [turned, gone])
@pytest.mark.parametrize("saved", [True, False])
def test_status_and_its_command_agree_on_a_damaged_export(
    fault: Callable[[Path], None], saved: bool, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` and the command that it suggests agree on a damaged export, with and without its checkpoint."""
    fault(output)
    if not saved:
        shutil.rmtree(output / "checkpoints")
    capsys.readouterr()
    assert main(["status", str(output), "--verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == 1
    assert main(["status", str(output)]) == 0  # it does not read contents
    capsys.readouterr()
    assert main(["status", str(output), "--verify"]) == 1
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "cannot be used" in said["export"]
    assert "the model is in" not in said["resume"]
    assert "not here" not in said["resume"]
    if saved:
        assert "writes the export again, from the checkpoint of step 2" in said["resume"]
        assert main(["train", str(output / "run.yaml"), f"output={output}"]) == 0
        assert export_hashes.damage(output) is None
    else:
        assert "starts over" in said["resume"]


def test_status_sees_without_reading_that_the_weights_are_gone(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    (output / "export" / "model.safetensors").unlink()
    assert main(["status", str(output)]) == 0
    assert "writes the export again, from the checkpoint of step 2" in capsys.readouterr().out
