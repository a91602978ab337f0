"""Every test in this folder states an assumption in its docstring and names existing files that rest on it; a failing
test prints both."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.assumed import rests_on_it
from support.places import ROOT

TESTS = [
    pytest.param(node, id=f"{path.stem}.{node.name}")
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if path != Path(__file__)
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.mark.parametrize("test", TESTS)
def test_each_assumption_names_existing_files(test: ast.FunctionDef) -> None:
    marks = [each for each in test.decorator_list if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]
    files = [
        ast.literal_eval(file) for mark in marks if getattr(mark.func, "id", "") == "rests_on_it" for file in mark.args
    ]
    assert files, "names no file that rests on it"
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert ast.get_docstring(test), "says no sentence"


def test_a_failure_shows_the_assumption_and_its_files() -> None:
    @rests_on_it("src/lockstep/cli.py")
    def wrong() -> None:
        """One is two."""
        raise AssertionError("1 == 2")

    with pytest.raises(AssertionError) as caught:
        wrong()
    (note,) = caught.value.__notes__
    assert "One is two." in note
    assert "src/lockstep/cli.py" in note
    assert "torch 2" in note
