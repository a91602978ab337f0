"""Commands that start no process: plan, list, schema, help."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command import write

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.distributed import launched
from lockstep.launchers import start


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    return tmp_path


def test_plan_starts_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml"]) == 0
    said = capsys.readouterr().out
    assert "2, each with 4 of 8 micro-batches" in said
    assert "-m lockstep train out/run.yaml" in said
    assert {p.name for p in here.iterdir()} == {"run.yaml"}


@pytest.mark.parametrize(("status", "imports"), [(None, 1), (75, 1), (0, 0)])
def test_what_is_finished_needs_no_server_to_fork_ranks_from(
    status: int | None, imports: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = []
    monkeypatch.setattr("lockstep.launchers.local.prestart", lambda: began.append(1))
    (here / "out").mkdir()
    launched.write(here / "out", replace(launched.here("local", 2), status=status))
    start.planned(load("run.yaml", []))
    assert len(began) == imports


@pytest.mark.parametrize(
    "words",
    [
        ["run.yaml", "steps=7", "launch.processes=3"],
        ["run.yaml", "--steps=7", "--launch.processes=3"],
        ["run.yaml", "--steps", "7", "--launch.processes", "3"],
        ["--steps", "7", "run.yaml", "launch.processes=3"],
        ["steps=7", "--launch.processes", "3", "run.yaml"],
    ],
)
def test_overrides_in_every_spelling_and_order(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "7 steps" in said
    assert "3, each with 2 or 3 of 8" in said


def test_plan_without_a_file_is_the_quick_start(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--epochs", "2"]) == 0
    said = capsys.readouterr().out
    assert "outputs/quickstart" in said
    assert "2 epochs" in said


def test_list_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    for name in ("classification", "local", "tcp", "jsonl"):
        assert f"\n  {name} " in said
    for name, bits in (("single", "same bits"), ("ddp", "same bits"), ("zero1", "rounding")):
        assert re.search(rf"^  {name} +{bits} +(ready|lacking) +\S", said, re.MULTILINE)
    assert main(["schema"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"data", "model", "optim"} <= found["properties"].keys()


def test_no_command_is_help_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0


def test_report_of_no_run_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"lockstep: {tmp_path} is not the output folder")
