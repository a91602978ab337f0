"""Every message of the source that begins with a key says that the value is a default if the user did not write that
key. The judge is independent of the code under test (tests/support/written_keys.py)."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from lockstep.config import plugins
from lockstep.config.errors import RunError, coded
from lockstep.config.run import Run
from lockstep.config.written import value_of, with_defaults_named
from support.places import ROOT
from support.sources import nodes
from support.written_keys import accused, known_keys

_HEAD = re.compile(r"([a-z_]+(?:\.[a-z_]\w*)*)(?=:| \(|,? has | is | cannot | needs )")


def _text(node: ast.AST) -> str:
    """Return the text of a literal, with X for interpolated parts."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "X"


def messages() -> list[tuple[str, str, str]]:
    """Return code, key and text of every message that begins with a key of the run file."""
    found = []
    for file in (*(ROOT / "src").rglob("*.py"), *(ROOT / "packages").rglob("*.py")):
        for node in nodes(file).of(ast.Call):
            if len(node.args) > 1 and isinstance(node.args[0], ast.Constant):
                code, text = str(node.args[0].value), _text(node.args[1])
                head = _HEAD.match(text)
                if re.fullmatch(r"LS\d{4}", code) and head is not None and head[1] in known_keys():
                    found.append((code, head[1], text))
    return found


def runs(folder: Path) -> list[Run]:
    """Return runs of every task, optimizer and launcher with few written keys."""
    base: dict[str, Any] = {"data": {"train": "a.csv"}, "model": {"type": "bert"}, "output": str(folder)}
    made = [Run.load(base)]
    for section, kind in (("task", "tasks"), ("optim", "optimizers"), ("launch", "launchers")):
        for name in plugins.names(kind):
            options: Any = plugins.find(kind, name).Options  # type: ignore[attr-defined]
            required = {key: "x.y" for key, field in options.model_fields.items() if field.is_required()}
            try:
                made.append(Run.load(base | {section: {"name": name, **required}}))
            except RunError:  # needs other keys
                continue
    return made


def test_messages_about_unwritten_keys_call_them_defaults_or_missing(tmp_path: Path) -> None:
    loaded, found = runs(tmp_path), messages()
    assert len(found) > 300
    assert len(loaded) > 20
    tried, wrong = set(), []
    for code, key, text in found:
        for run in loaded:
            known, value = value_of(run, key)
            if not known or run.wrote(key) or value is None or value == {}:  # off: the message needs the key
                continue
            tried.add(code)
            said = with_defaults_named(coded(code, text), run)
            if accused(said, set()):
                wrong.append(said)
            break
    assert wrong == []
    assert len(tried) > 100
