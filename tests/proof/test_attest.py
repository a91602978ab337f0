"""`lockstep attest` and `lockstep audit`: what was forged is found, each kind of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lockstep.checkpoint.manifest import Manifest, read_manifest
from lockstep.cli import main
from lockstep.config.run import load
from lockstep.training import fingerprints
from lockstep.training.step_record import StepRecord
from support.harness import TINY

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def attested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and the attested OUTPUT of a run, which must not be changed."""
    folder = tmp_path_factory.mktemp("attested")
    rows = [{"text": f"text number {n} of {n * n}", "label": n % 2} for n in range(66)]
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"data": {"train": str(folder / "train.jsonl"), "validation": str(folder / "validation.jsonl")}}
    values["data"]["max_length"] = 32  # type: ignore[assignment]
    words = ["strategy.name=single", "launch.processes=1", "steps=9", "checkpoint.every=4", "checkpoint.keep=5"]
    run = load(None, words, TINY | values | {"output": str(folder / "out")})
    (folder / "run.yaml").write_text(run.dump())
    assert main(["train", str(folder / "run.yaml")]) == 0
    assert main(["attest", str(folder / "out")]) == 0
    return folder


@pytest.fixture
def copy(attested: Path, tmp_path: Path) -> Path:
    shutil.copytree(attested / "out", tmp_path / "out", symlinks=True)
    return tmp_path / "out"


def audited(output: Path, capfd: pytest.CaptureFixture[str], *words: str, status: int = 1) -> str:
    capfd.readouterr()
    assert main(["audit", str(output), "--samples", "9", "--within", "9", *words]) == status
    return " ".join(capfd.readouterr().out.split())


def test_the_export_of_a_mean_is_not_called_forged(
    attested: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["average.last=2", f"output={tmp_path / 'out'}"]
    assert main(["train", str(attested / "run.yaml"), *words]) == 0
    assert main(["attest", str(tmp_path / "out")]) == 0
    assert "not checked: whether the export is the mean of" in audited(tmp_path / "out", capfd, status=0)


def test_an_honest_run_passes_on_another_number_of_processes(attested: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = audited(attested / "out", capfd, status=0)
    assert "9 are recomputed by 2 processes" in said
    for stretch in ("1 to 4", "5 to 8", "9 to 9"):
        assert f"steps {stretch}: the same bits" in said
    assert "result: matches the attestation" in said


def changed_line(output: Path) -> None:
    lines = (output / fingerprints.FILE).read_text().splitlines()
    lines[6] = json.dumps(json.loads(lines[6]) | StepRecord.of_numbers(7, 0.001, 1.0).to_json())
    (output / fingerprints.FILE).write_text("\n".join(lines) + "\n")


def other_checkpoint(output: Path) -> None:
    """Weights of the author's own, under a manifest that is right about them."""
    folder = output / "checkpoints/step-000008"
    (name,) = [p.name for p in folder.glob("*.safetensors")]
    tensors, metadata = load_file(folder / name), _metadata(folder / name)
    tensors["model.score.weight"] += 1
    save_file(tensors, folder / name, metadata)
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    import hashlib

    manifest.hashes[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_bytes(manifest.dump())


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def other_export(output: Path) -> None:
    path = output / "export/model.safetensors"
    tensors = load_file(path)
    tensors["score.weight"] += 1
    save_file(tensors, path, {"format": "pt"})
    hashes = json.loads((output / "export.json").read_text())
    import hashlib

    hashes["model.safetensors"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (output / "export.json").write_text(json.dumps(hashes))


def other_run_file(output: Path) -> None:
    text = (output / "run.yaml").read_text()
    assert "learning_rate: 0.005" in text
    (output / "run.yaml").write_text(text.replace("learning_rate: 0.005", "learning_rate: 0.004"))


def better_scores(name: str) -> Callable[[Path], None]:
    def forge(output: Path) -> None:
        text = (output / name).read_text()
        forged = re.sub(r'("accuracy": )[\d.]+', r"\g<1>0.999", text)
        assert forged != text
        (output / name).write_text(forged)

    return forge


@pytest.mark.parametrize("name", ["metrics.jsonl", "scores.json"])
def test_better_scores_are_found(name: str, copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    better_scores(name)(copy)
    assert f"{name} was changed: a score, for example" in audited(copy, capfd)


def test_a_changed_line_with_its_old_hash_cannot_be_attested(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = (copy / fingerprints.FILE).read_text().splitlines()
    lines[6] = json.dumps(json.loads(lines[6]) | {"loss": 0.001})
    (copy / fingerprints.FILE).write_text("\n".join(lines) + "\n")
    assert main(["attest", str(copy)]) == 2
    assert "step 7: the hash does not match loss and gradient norm" in " ".join(capfd.readouterr().err.split())


FORGED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    # what is done, what is said of it, and what is said if somebody attests it anew
    "line": (changed_line, "a step's line was edited", "in step 7 loss or gradient norm differ"),
    "checkpoint": (
        other_checkpoint,
        "the checkpoint of step 8 was changed",
        "the weights of the checkpoint of step 8",
    ),
    "export": (other_export, "the export was changed: model.safetensors", "weights are not those of the checkpoint"),
    "run file": (other_run_file, "run.yaml was changed", "other settings that determine the weights"),
}


@pytest.mark.parametrize("what", sorted(FORGED))
def test_forgeries_are_found(what: str, copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    forge, said, _ = FORGED[what]
    forge(copy)
    assert said in audited(copy, capfd)


@pytest.mark.parametrize("what", sorted(FORGED))
def test_forgeries_that_are_attested_again_are_found(what: str, copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By what is recomputed, or does not fit together."""
    forge, _, said = FORGED[what]
    forge(copy)
    assert main(["attest", str(copy)]) == 0
    assert said in audited(copy, capfd)


def test_a_swapped_row_is_found(attested: Path, copy: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = (attested / "train.jsonl").read_text().splitlines()
    lines[3], lines[4] = lines[4], lines[3]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    assert "a row was changed" in audited(copy, capfd, f"data.train={tmp_path / 'train.jsonl'}")


def test_a_changed_attestation_is_found(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = copy / "attestation/attestation.json"
    path.write_text(path.read_text().replace('"steps": 9', '"steps": 8'))
    assert "does not match its own hash" in audited(copy, capfd)


@pytest.mark.extras
def test_a_signature_needs_its_key(copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("model_signing")
    for name in ("own", "other"):
        make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{tmp_path / name}.pem"]
        subprocess.run(make, check=True)
        public = ["openssl", "ec", "-in", f"{tmp_path / name}.pem", "-pubout", "-out", f"{tmp_path / name}.pub"]
        subprocess.run(public, check=True)
    assert "it is not signed, but a key was given" in audited(copy, capfd, "--key", str(tmp_path / "own.pub"))
    assert main(["attest", str(copy), "--key", str(tmp_path / "own.pem")]) == 0
    assert "the signature matches this key" in audited(copy, capfd, "--key", str(tmp_path / "own.pub"), status=0)
    assert "the signature does not match" in audited(copy, capfd, "--key", str(tmp_path / "other.pub"))
    changed_line(copy)
    assert main(["attest", str(copy), "--key", str(tmp_path / "other.pem")]) == 0
    assert "the signature does not match" in audited(copy, capfd, "--key", str(tmp_path / "own.pub"))


def test_runs_that_cannot_be_attested_are_refused(
    copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(said: str, *words: str) -> None:
        capfd.readouterr()
        assert main([*words]) == 2
        assert said in " ".join(capfd.readouterr().err.split())

    refused("has no run.yaml", "attest", str(tmp_path))
    refused("--key: no such file:", "attest", str(copy), "--key", str(tmp_path / "none.pem"))
    refused("--samples: invalid value 0", "audit", str(copy), "--samples", "0")
    shutil.rmtree(copy / "attestation")
    (copy / "attestation").symlink_to(tmp_path)
    (tmp_path / "mine").touch()
    assert main(["attest", str(copy)]) == 0
    assert not (copy / "attestation").is_symlink()  # the link is replaced, what it leads to is left
    assert (tmp_path / "mine").is_file()
    (copy / "attestation.sig").mkdir()
    refused("attestation.sig cannot be written: is a directory", "attest", str(copy))
    (copy / fingerprints.FILE).write_text('{"step": 1, "hash": "x"}\n')
    refused("expected a line for each of the steps 1 to 9", "attest", str(copy))
    shutil.rmtree(copy / "attestation", ignore_errors=True)
    refused("lockstep attest writes it", "audit", str(copy))
    shutil.rmtree(copy / "checkpoints")
    refused("cannot be attested without a checkpoint", "attest", str(copy))
    shutil.rmtree(copy / "export")
    refused("the export is missing", "attest", str(copy))
