"""`lockstep sweep` does not repeat finished trials, continues interrupted ones, and refuses invalid ones."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.lab.sweep import sweep_file
from lockstep.lab.sweep.sweep import Slots
from lockstep.lab.sweep.sweep_file import Range, format_value, name_of, parse, product, read
from support.command import LOCKSTEP, bits, ended, finish, start, until, write
from support.harness import TINY
from support.messages import mentions, raises

NOTHING: dict[str, Any] = {"over": [], "metric": None, "split": None, "parallel": None, "search": None, "out": None}


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
@pytest.mark.usefixtures("nobody_is_left")
def test_a_stopped_sweep_resumes(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, launch={"device": "cpu", "threads": 1, "processes": 1})
    sweep = [*LOCKSTEP, "sweep", "run.yaml", "--over", "optim.learning_rate=1e-3,5e-3", "--metric", "accuracy"]
    folder = tmp_path / "out-sweep"
    first, second = folder / "learning_rate-1e-3", folder / "learning_rate-5e-3"
    process = start(sweep, tmp_path, cache)
    until(lambda: any((first / "checkpoints").glob("step-*")), "a checkpoint of the first trial", process)
    process.send_signal(signal.SIGTERM)
    status, out, err = ended(process)
    assert status == 75, err
    assert "run the same command to continue" in out
    assert not second.exists()

    status, out, err = ended(start(sweep, tmp_path, cache))
    assert status == 0, err
    assert "trial learning_rate-1e-3 continues" in out
    assert "resuming after step" in (first / "train.out").read_text()
    rows = json.loads((folder / "sweep.json").read_text())["trials"]
    assert [(row["name"], row["state"]) for row in rows] == [(first.name, "done"), (second.name, "done")]
    found = {row["name"]: row["metric"] for row in rows}
    best = max(found, key=lambda name: found[name])
    assert f"{folder.name}/{best}/export (accuracy {found[best]:.4g})" in out
    page = (folder / "comparison.html").read_text()
    assert first.name in page
    assert second.name in page

    before = (first / "train.out").stat().st_mtime_ns
    status, out, _ = ended(start(sweep, tmp_path, cache))
    assert (status, (first / "train.out").stat().st_mtime_ns) == (0, before)
    assert "2 of them finished already" in out
    finish(tmp_path, cache, "optim.learning_rate=1e-3")  # the trial is the plain run, although it was interrupted
    assert bits(tmp_path)["export"] == bits_of(first)

    write(tmp_path, launch={"device": "cpu", "threads": 1, "processes": 1}, seed=1)
    status, _, err = ended(start(sweep, tmp_path, cache))
    assert status == 2
    assert "seed: 0 there, 1 now" in err


def bits_of(folder: Path) -> str:
    import hashlib

    return hashlib.sha256((folder / "export" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.processes
def test_a_trial_that_fails_is_a_line_with_its_reason(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, launch={"device": "cpu", "threads": 1, "processes": 1})
    process = start([*LOCKSTEP, "sweep", "run.yaml", "--over", "data.source=nothing-there"], tmp_path, cache)
    status, out, _ = ended(process)
    assert status == 1
    (row,) = json.loads((tmp_path / "out-sweep" / "sweep.json").read_text())["trials"]
    assert row["state"] == "failed"
    assert "nothing-there" in row["reason"]
    assert row["reason"] in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to vary"),
        (["--over", "optim.lerning_rate=1,2"], "learning_rate"),
        (["--over", "optim.learning_rate=1e-3,-1"], "greater than 0"),
        (["--over", "launch.processes=1,9"], "trial processes-9: launch.processes: 9 processes cannot share"),
        (["--over", "strategy.name=ddp,pipeline", "launch.processes=1"], "trial name-pipeline"),
        (["--over", "optim.learning_rate=1e-5..1e-3"], "needs a search"),
        (["--over", "optim.learning_rate=1e-3..1e-5", "--search", "3"], ":log: low (0.001) must be below"),
        (["--over", "optim.learning_rate=0..1:log", "--search", "3"], "above 0"),
        (["--over", "output=a,b"], "sets it for every trial"),
        (["--over", "seed=1,2", "--over", "seed=3"], "given twice"),
        (["--over", "seed=1,2", "--parallel", "0"], "--parallel"),
    ],
)
def test_bad_keys_and_values_are_refused_before_anything_starts(
    words: list[str], said: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "run.yaml", *words]) == 2
    assert said in capsys.readouterr().err
    assert os.listdir(run_file.parent) == ["run.yaml"]


def test_prepared_trials_are_plain_run_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, hub={"push_to": "somebody/something"})
    assert main(["sweep", "run.yaml", "--over", "seed=1,2", "steps=5", "--prepare"]) == 0
    lines = capsys.readouterr().out.split("\n")[:2]
    assert lines == [f"lockstep train out-sweep/seed-{i}/run.yaml" for i in (1, 2)]
    run = load("out-sweep/seed-2/run.yaml", [])
    assert (run.seed, run.steps, run.output, run.hub.push_to) == (2, 5, "out-sweep/seed-2", None)
    assert run.name == "tiny-seed-2"
    assert main(["sweep", "run.yaml", "--over", "seed=1,2", "data.source=gone.csv", "--prepare", "--out", "o"]) == 0
    assert capsys.readouterr().out.count("gone.csv") == 1  # the data may be on another machine


def test_a_sweep_file(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "sweep.yaml"
    values = {
        "run": "run.yaml",
        "set": {"steps": 3},
        "over": {"seed": [1, 2]},
        "trials": [{"batch_size": 32}, {"batch_size": 64, "optim.learning_rate": 0.1}],
        "metric": "accuracy",
    }
    path.write_text(yaml.safe_dump(values))
    found = read(str(path), {}, ["track.every=2"], NOTHING)
    assert (found.base.steps, found.base.track.every, found.metric, found.split) == (3, 2, "accuracy", "validation")
    assert found.combinations() == [
        {"batch_size": 32, "seed": 1},
        {"batch_size": 32, "seed": 2},
        {"batch_size": 64, "optim.learning_rate": 0.1, "seed": 1},
        {"batch_size": 64, "optim.learning_rate": 0.1, "seed": 2},
    ]
    assert read(str(path), {}, [], NOTHING | {"metric": "-loss", "parallel": 3}).metric == "-loss"
    path.write_text(yaml.safe_dump(values | {"metrik": "accuracy"}))
    with raises("LS1000", "'metric'"):
        read(str(path), {}, [], NOTHING)


def test_values_of_the_command_line() -> None:
    found = parse(
        ["optim.betas=[0.9, 0.99],[0.9, 0.999]", "model.source=a,'b,c'", "strategy.options={},{replicate: 2}"]
    )
    assert found == {
        "optim.betas": [[0.9, 0.99], [0.9, 0.999]],
        "model.source": ["a", "b,c"],
        "strategy.options": [{}, {"replicate": 2}],
    }
    assert product({"a": [1, 2], "b": [3]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert product({}) == [{}]
    assert format_value({"replicate": 2}) == "{replicate: 2}"


def test_names_are_short_distinct_and_the_same_every_time() -> None:
    assert name_of({"optim.learning_rate": 3e-5, "model.source": "google/bert"}, set()) == (
        "learning_rate-3e-05_source-google-bert"
    )
    assert name_of({"model.source": "a", "tokenizer.source": "b"}, set()) == "model.source-a_tokenizer.source-b"
    taken = {name_of({"model.source": "google-bert"}, set())}
    other = name_of({"model.source": "google/bert"}, taken)
    assert other not in taken
    assert other == name_of({"model.source": "google/bert"}, taken)
    assert len(name_of({"model.source": "x" * 500}, set())) <= 80
    assert "=" not in name_of({"a": "x=y"}, set())  # a word with one is an override on the command line


def test_trials_at_once_share_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = NOTHING | {"over": ["seed=1,2"], "parallel": 2}
    values = TINY | {"launch": {"processes": "auto"}}
    monkeypatch.setattr("lockstep.lab.sweep.sweep.visible", lambda run: ["4", "5", "6", "7"])
    monkeypatch.setattr("lockstep.lab.sweep.sweep.processes_of", lambda run: 4)
    slots = Slots(read(None, values, [], options))
    assert slots.keys({"seed": 1}) == {"launch.processes": 2}
    assert [slots.variables(i)["CUDA_VISIBLE_DEVICES"] for i in (0, 1)] == ["4,5", "6,7"]
    assert (slots.free({0: "taken"}), slots.free({0: "taken", 1: "too"})) == (1, None)
    with raises("LS8358", "2", "3"):
        slots.keys({"launch.processes": 3})
    assert Slots(read(None, values, [], options | {"parallel": None})).keys({"seed": 1}) == {}


@pytest.mark.processes
def test_under_slurm_it_is_one_array_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {
        "sbatch": 'for word; do file=$word; done; [ "$file" = --test-only ] && cat > /dev/null && exit 0; echo 4711',
        "scontrol": 'echo "JobId=4711 JobState=PENDING Reason=Resources"',
    }
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, launch={"name": "slurm", "processes": 1, "device": "cpu", "threads": 1})
    words = ["sweep", "run.yaml", "--over", "seed=1,2,3", "--parallel", "2"]
    assert main(words) == 0
    assert "array job 4711 is queued: 3 trials" in capsys.readouterr().out
    (script,) = (tmp_path / "out-sweep").glob("*.sbatch")
    text = script.read_text()
    assert "#SBATCH --array=0-2%2" in text
    assert text.index("seed-1/run.yaml") < text.index("seed-3/run.yaml")
    records = [json.loads((tmp_path / f"out-sweep/seed-{i}/launch.json").read_text()) for i in (1, 2, 3)]
    assert [record["job"] for record in records] == ["4711_0", "4711_1", "4711_2"]
    script.unlink()
    assert main(words) == 0  # they wait, and are not queued twice
    assert not script.exists()
    assert capsys.readouterr().out.count("waiting") == 3
    assert main([*words, "--over", "launch.threads=1,2"]) == 2
    assert "cannot be varied" in capsys.readouterr().err


def test_a_search_depends_on_its_seed_and_on_what_was_found() -> None:
    pytest.importorskip("optuna")
    over = {"rate": Range(low=1e-5, high=1e-1, log=True), "size": [16, 32], "depth": Range(low=1, high=4)}

    def tried(count: int, known: list[Any] | None = None) -> list[Any]:
        found = list(known or [])
        while len(found) < count:
            keys = sweep_file.propose(over, found, 7, more_is_better=False)
            assert 1e-5 <= keys["rate"] <= 1e-1
            assert keys["size"] in (16, 32)
            assert keys["depth"] in (1, 2, 3, 4)
            found.append((keys, abs(keys["rate"] - 1e-3)))  # the best rate is 1e-3
        return found

    whole = tried(30)
    assert tried(30, whole[:12]) == whole  # as if it had not been stopped
    assert min(value for _, value in whole) < 1e-3
    assert sweep_file.propose(over, whole, 8, False) != sweep_file.propose(over, whole, 7, False)
    running = [*whole, ({"rate": 1e-3, "size": 16, "depth": 1}, None)]
    assert sweep_file.propose(over, running, 7, more_is_better=False)


def test_a_search_takes_any_seed() -> None:
    pytest.importorskip("optuna")
    over = {"rate": Range(low=1e-5, high=1e-1, log=True)}
    assert sweep_file.propose(over, [], 2**32 + 7, True) == sweep_file.propose(over, [], 7, True)


@pytest.mark.parametrize(
    ("over", "other"), [("1e-3..1e-2:log", "learning_rate=0.0005"), ("1e-4,0.001", "learning_rate=0.0005")]
)
def test_a_search_over_other_values_is_refused(
    over: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """optuna accepts no trial whose value is outside of the search; a wider range is accepted."""
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, launch={"device": "cpu", "threads": 1, "processes": 1})
    (tmp_path / "out-sweep").mkdir()
    trial = {"keys": {"optim.learning_rate": 5e-4}}
    (tmp_path / "out-sweep/sweep.json").write_text(json.dumps({"trials": [trial]}))
    assert main(["sweep", "run.yaml", "--over", f"optim.learning_rate={over}", "--search", "2"]) == 2
    assert mentions(capsys.readouterr().err, "LS8531", other)
    wide = {"optim.learning_rate": Range(low=1e-5, high=1e-2, log=True)}
    assert sweep_file.outside(wide, trial["keys"]) is None
    assert sweep_file.outside(wide, {"optim.learning_rate": "auto"}) is not None


def test_a_search_tries_both_ends_of_a_range_first() -> None:
    corners = sweep_file.corners({"optim.max_grad_norm": Range(low=-1, high=1), "seed": [1, 2]})
    assert {corner["optim.max_grad_norm"] for corner in corners} == {-1, 1}
    assert {corner["seed"] for corner in corners} == {1, 2}
