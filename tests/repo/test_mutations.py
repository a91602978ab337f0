"""The list of planted faults stays valid: each one matches exactly one place of the source, and is valid Python."""

import ast
import sys
from pathlib import Path

import pytest

import lockstep
from support.places import ROOT

SOURCE = Path(lockstep.__file__).parent

sys.path.insert(0, str(ROOT / "benchmarks"))

import mutations  # noqa: E402

FAULTS = mutations.faults()


def test_planted_faults_cover_all_deciding_packages() -> None:
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    rooms = {fault.file.partition("/")[0] for fault in FAULTS}
    assert rooms == {"checkpoint", "config", "data", "distributed", "strategies", "tasks", "training"}


def test_each_planted_fault_applies_to_its_file() -> None:
    wrong = []
    for fault in FAULTS:
        text = (SOURCE / fault.file).read_text(encoding="utf-8")
        try:
            planted = fault.planted(text)
        except ValueError as told:
            wrong.append(str(told))
        else:
            assert planted != text, fault.name
            ast.parse(planted)
    assert not wrong, "the source has changed: " + "; ".join(wrong)


def test_each_fault_has_a_description_and_its_tests() -> None:
    near = mutations.listed()["near"]
    assert near.keys() == {fault.file for fault in FAULTS}
    assert all(fault.does.endswith((".", ").")) for fault in FAULTS)
    assert all(mutations.file_of(name.partition("::")[0]) for names in near.values() for name in names)


def test_a_fault_whose_text_is_missing_or_occurs_twice_is_an_error() -> None:
    fault = mutations.Fault("some", "some.py", "a = 1", "a = 2", "Something.")
    for text in ("b = 1\n", "a = 1\na = 1\n"):
        with pytest.raises(ValueError, match="and not once"):
            fault.planted(text)
