"""The commonest mistakes give a message with a code, which names what is wrong; docs/how-to/troubleshooting.md has a
row for each whose message does not say what to do."""

import re
from pathlib import Path

import pytest

from lockstep.cli import main
from support.messages import mentions
from support.mistakes import MISTAKES, Mistake, prepare
from support.places import ROOT
from support.written_keys import accused, keys_written

PAGE = ROOT / "docs/how-to/troubleshooting.md"


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_a_mistake_is_refused_with_its_code(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    if mistake.change is not None:
        mistake.change(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (mistake.environment or {}).items():
        monkeypatch.setenv(name, value)
    assert main(mistake.arguments()) in (1, 2)
    err = capfd.readouterr().err
    assert mentions(err, mistake.code, mistake.shown)
    assert "Traceback" not in err
    assert accused(err, keys_written(tmp_path / "run.yaml", mistake.arguments())) == []


def test_the_control_without_a_mistake_the_job_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "run.yaml"]) == 0


# Their messages say what to do, such as the names that there are.
NO_ROW = {
    "a file in place of an output folder",
    "a header without rows",
    "a key in the wrong section",
    "a key twice",
    "a number out of range",
    "a prediction from a folder that is not there",
    "a report of no run",
    "a run file that is not there",
    "a run to compare that is not there",
    "a text for a number",
    "a tokenizer's folder that is not there",
    "an output folder that is a file",
    "an override without =",
    "an unknown command",
    "an unknown entry of a model's config",
    "an unknown optimizer",
    "an unknown schedule",
    "an unknown strategy",
    "the name that transformers has for a task",
}


def test_each_mistake_has_a_row_in_troubleshooting() -> None:
    rows = re.findall(r"^\| (.+?) \| (LS\d{4})\b", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(MISTAKES) >= 50
    assert {mistake.name for mistake in MISTAKES} >= NO_ROW
    assert [row for row in rows if row in {(mistake.name, mistake.code) for mistake in MISTAKES}] == [
        (mistake.name, mistake.code) for mistake in MISTAKES if mistake.name not in NO_ROW
    ]
