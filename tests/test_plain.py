"""`lockstep.plain` imports nothing of lockstep and is short; every task's steps are those that it computes."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import tiny
from task_runs import make

import lockstep.plain
from lockstep.tools import against_plain

FILES = sorted(Path(lockstep.plain.__file__).parent.glob("**/*.py"))
ALLOWED = {"torch", "transformers", "peft", "numpy", "pyarrow", "datasets", "trl", "sentence_transformers", "sacrebleu"}
MOST = 600  # lines of code for all tasks


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def code_lines(file: Path) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    docs = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        held = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if held and ast.get_docstring(node) is not None:
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    with open(file, encoding="utf-8") as text:
        for token in tokenize.generate_tokens(text.readline):
            if token.type not in quiet:
                lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def test_it_imports_nothing_of_lockstep() -> None:
    import sys

    assert FILES
    for file in FILES:
        for name in imports(file):
            root = name.partition(".")[0]
            own = name.startswith("lockstep.plain")
            assert own or root in ALLOWED or root in sys.stdlib_module_names, f"{file.name} imports {name}"


def test_it_is_short() -> None:
    assert sum(map(code_lines, FILES)) <= MOST


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.mark.parametrize("kind", ["packed", "documents", "prompts"])
def test_a_task_is_as_plain_computes_it(kind: str, folder: Path) -> None:
    found = against_plain.differences(make(folder, kind))
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)


def test_classification_is_as_plain_computes_it(tmp_path: Path) -> None:
    found = against_plain.differences(tiny(output=str(tmp_path)))
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)


def test_a_mean_of_means_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.tasks.classification import Classification

    summed: Callable[..., Any] = Classification.loss_sum
    monkeypatch.setattr(Classification, "loss_sum", lambda self, *a: summed(self, *a) * 22 / 8 / len(a[1]))
    found = against_plain.differences(tiny(output=str(tmp_path)))
    assert any("loss" in line for line in found.differences)
