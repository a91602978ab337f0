"""Files named in comments and docstrings exist: moving a file can leave its old name behind."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator

from support.places import ROOT

# Files of others, and names that stand for any file.
ELSEWHERE = {
    "package/module.py",
    "tests/ROOM/test_NAME.py",
    "create_pretraining_data.py",
    "0.py",
    "1.py",
    "mine.py",
    "run_clm.py",
    "run_mlm.py",
    "PEER.py",
    "test_x.py",
}


NAME = re.compile(r"[\w/-]+\.py\b")


def _prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment and docstring of a file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def test_files_that_comments_and_docstrings_name_are_there() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ends = {file[at:] for file in files for at in [0, *(m.end() for m in re.finditer("/", file))]}
    known = ends | ELSEWHERE
    gone = [
        f"{file}:{line} names {name}"
        for file in files
        if file.endswith(".py")
        and (ROOT / file).is_file()
        and (unknown := {*NAME.findall(source := (ROOT / file).read_text(encoding="utf-8"))} - known)
        for line, text in _prose(source)
        for name in NAME.findall(text)
        if name in unknown
    ]
    assert len(ends) > 500
    assert gone == []
