"""`--json`: one object of one shape on standard output, whatever a command prints besides."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from lockstep import commands
from lockstep.cli import main
from lockstep.commands import before_a_run
from lockstep.config.run import Run
from lockstep.launchers import start
from lockstep.track import json_output
from lockstep.track.console import RECORD, Console, value_of
from lockstep.track.json_output import Answer
from support.messages import mentions

# Commands that print no facts and no table: a run's own words, files, or lines of data.
NO_TABLE = {"init", "trace", "schema", "logs", "stop", "report", "push", "attest", "rendezvous"}
COMMAND = """
import subprocess, sys
from lockstep.commands import before_a_run
from lockstep.track import json_output
from lockstep.track.console import Console
with json_output.recording("verify") as finish:
    console = Console(True)
    print("a library prints")
    subprocess.run([sys.executable, "-c", "print('a rank prints')"])
    console.facts({"device": "cpu"})
    rows = [["1", "1,520.5", "same"], ["2", "", "same"]]
    console.table("ddp compared with one process", ["step", "loss", ""], rows, key="steps")
    console.note("a note")
    sys.exit(finish(1))
"""


def test_each_command_that_prints_a_table_has_it() -> None:
    without = set()
    for name in commands.HELP:
        parser = argparse.ArgumentParser()
        module = importlib.import_module(f"lockstep.commands.{commands.file_of(name)}")
        getattr(module, f"{name}_arguments")(parser)
        if not any("--json" in action.option_strings for action in parser._actions):
            without.add(name)
    assert without == NO_TABLE


@pytest.mark.processes
def test_standard_output_has_only_the_json_object() -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True)
    assert done.returncode == 1
    answer = Answer.model_validate_json(done.stdout)
    assert answer == Answer(
        command="verify",
        status=1,
        facts={"device": "cpu"},
        tables={"steps": [{"step": 1, "loss": 1520.5, "name": "same"}, {"step": 2, "loss": None, "name": "same"}]},
        notes=["note: a note"],
    )
    assert sorted(done.stderr.split("\n")[:2]) == ["a library prints", "a rank prints"]


def test_the_command_line_records_what_a_command_says(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_bench(known: argparse.Namespace) -> int:
        Console(True).table("tiny: median", ["processes", "examples/s"], [["2", "1,520"]], key="jobs")
        return 1

    monkeypatch.setattr(before_a_run, "run_bench", run_bench)
    assert main(["bench", "--json"]) == 1
    answer = Answer.model_validate_json(capfd.readouterr().out)
    assert (answer.command, answer.status) == ("bench", 1)
    assert answer.tables == {"jobs": [{"processes": 2, "examples/s": 1520}]}
    assert RECORD.get() is None, "the next command of this process prints again"
    assert main(["bench"]) == 1
    assert "median" in capfd.readouterr().out, "the control"


def test_result_of_training_as_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks print to standard error; the object has what they left in OUTPUT: their notes of this start, and of a run
    that came to its end the scores."""
    folder = tmp_path / "out"
    folder.mkdir()
    scores = {"step": 9, "export": "last", "splits": {"test": {"loss": 0.25, "accuracy": 0.5}}}
    (folder / "scores.json").write_text(json.dumps(scores))
    (folder / "export.json").write_text(json.dumps({"model.safetensors": "ab"}))
    (folder / "log.txt").write_text("note: of an earlier start\n")

    def train(run: Run, status: int) -> int:
        with open(folder / "log.txt", "a") as log:
            log.write(f"--- 2 processes\nnote: of status {status}\nnote: of status {status}\nstep 1\n")
        os.write(1, b"a rank\n")
        return status

    for status in (0, 75):
        monkeypatch.setattr(start, "train", partial(train, status=status))
        assert main(["train", "--json", f"output={folder}"]) == status
        said = capfd.readouterr()
        answer = Answer.model_validate_json(said.out)
        assert (answer.command, answer.status, said.err) == ("train", status, "a rank\n")
        assert answer.tables == ({} if status else {"scores": [{"split": "test", "loss": 0.25, "accuracy": 0.5}]})
        assert answer.notes == [f"note: of status {status}"]
        assert answer.facts.get("sha256") == (None if status else {"model.safetensors": "ab"})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert main(["train", "--json"]) == 2
    assert mentions(capfd.readouterr().err, "LS8112")


def test_a_refusal_is_a_message_and_no_object(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "epohcs=3", "--json"]) == 2
    said = capfd.readouterr()
    assert (said.out, "epochs" in said.err) == ("", True)


def test_values_without_json_form_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    json_output.emit("evaluate", 0, {"loss": float("nan"), "most": float("inf"), "token": "hf_" + "a" * 34})
    found = json.loads(capsys.readouterr().out)["facts"]
    assert (found["loss"], found["most"]) == (None, None)
    assert "aaaa" not in str(found["token"]), "a secret is struck"


@pytest.mark.parametrize(
    ("cell", "value"),
    [("1,520", 1520), ("0.5", 0.5), ("1.2e-05", 1.2e-05), ("", None), ("same", "same"), ("1/2", "1/2")],
)
def test_json_values_of_table_cells(cell: str, value: object) -> None:
    assert value_of(cell) == value


def test_ranks_that_are_silent_record_nothing() -> None:
    with json_output.recording("bench"):
        Console(False).facts({"a": "b"})
        record = RECORD.get()
    assert record is not None
    assert record.facts == {}
