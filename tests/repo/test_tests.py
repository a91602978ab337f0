"""Tests mirror the rooms, and share nothing but what is in `tests/support`, which imports no test."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.places import ROOT, TESTS, TESTS_PATH
from support.sources import nodes

BESIDE = {"support", "golden"}  # folders that hold no tests
ROOMS = {path.name for path in (ROOT / "src/lockstep").iterdir() if path.is_dir() and path.name[0] != "_"}
ROOMS |= {path.name.removeprefix("lockstep-") for path in (ROOT / "packages").iterdir()} - {
    "trace-report"  # in trace
}
MARK = re.compile(r"mark\.(processes|slow|cluster|extras)\b")
WHOLE = {
    "jobs",
    "repo",
    "crossed",
    "museum",
    "assumptions",
}  # crossed and museum: programs with a test each


def imported(file: Path) -> set[str]:
    names = {alias.name for node in nodes(file).of(ast.Import) for alias in node.names}
    return names | {node.module for node in nodes(file).of(ast.ImportFrom) if node.module}


def is_a_test(name: str) -> bool:
    return any(part.startswith("test_") for part in name.split("."))


def test_nothing_imports_a_file_of_tests() -> None:
    files = [*TESTS.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    importing = {file: {name for name in imported(file) if is_a_test(name)} for file in files}
    assert len(importing) > 250
    assert {str(file.relative_to(ROOT)): names for file, names in importing.items() if names} == {}


def test_the_control_forbidden_import_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text("def f():\n    from test_b import c\n    import data.test_d\n")
    assert {name for name in imported(file) if is_a_test(name)} == {"test_b", "data.test_d"}


def test_every_file_of_tests_is_in_a_room_and_its_name_is_there_once() -> None:
    """Names are unique because pytest imports test files by name."""
    files = [file.relative_to(TESTS) for file in TESTS.rglob("test_*.py")]
    assert {file.parts[0] for file in files} == (ROOMS | WHOLE)
    assert len({file.name for file in files}) == len(files)
    assert {path.name for path in TESTS.iterdir() if path.is_dir() and path.name[0] not in "_."} - {
        file.parts[0] for file in files
    } == BESIDE


def test_marks_are_written_where_the_tests_are() -> None:
    """`.ci/run` searches files for these words, of which names of marks consist."""
    found = {file.name: {*MARK.findall(file.read_text())} for file in (TESTS / "support").rglob("*.py")}
    assert {name: marks for name, marks in found.items() if marks} == {
        "marks.py": {"slow"},  # by `slow`; those of `long` are not asked
        "hosts.py": {"cluster", "processes"},  # by `cluster`
    }


@pytest.mark.processes
def test_variables_of_the_users_environment_do_not_reach_the_tests() -> None:
    """Variables of the user's environment are removed: WANDB_MODE once changed the result of a test."""
    code = "import json, os; from support import surroundings as s; s.close(); print(json.dumps(dict(os.environ)))"
    theirs = dict.fromkeys(("WANDB_MODE", "HF_HOME", "NO_COLOR", "RANK", "GIT_DIR", "LC_ALL", "PYTHONHASHSEED"), "1")
    ours = {"PATH": os.environ["PATH"], "PYTHONPATH": TESTS_PATH, "TMPDIR": "/tmp", "PIP_INDEX_URL": "here"}
    done = subprocess.run([sys.executable, "-c", code], env=theirs | ours, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout).items() >= ours.items()
    assert not json.loads(done.stdout).keys() & theirs.keys()
