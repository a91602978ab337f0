"""docs/reference/messages.md: every message that lockstep prints, by its code, made from the source.

In: calls such as `RunError("LS2031", f"...")` in src/lockstep and packages/; the table of
docs/how-to/troubleshooting.md, which says what to do about the commonest. Out: `messages()`, the text of the page,
which `python docs/messages.py` writes. Imports nothing of lockstep.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("src/lockstep", "packages")
ROOMS = {
    "0": "The command line, Python, trackers and reports",
    "1": "The run file",
    "2": "Data",
    "3": "Tasks and models",
    "4": "Strategies and engines",
    "5": "Training",
    "6": "Checkpoints and exports",
    "7": "Processes and launchers",
    "8": "Commands",
    "9": "Traces",
}
CODE = re.compile(r"LS\d{4}")
LINK = re.compile(r"\]\((\w[\w-]*\.md)\)")  # to a page beside the one on trouble
KEY = re.compile(r"^([a-z_]+(?:\.[a-z0-9_]+)*)[.:]")
HEAD = """---
hide: [toc]
---

# Messages

`python docs/messages.py` writes this page from the source. A message ends its first line with its code: look it up
here, or search the site for it. `--verbose`, or `LOCKSTEP_VERBOSE=1` in the environment, prints the address of each
code under the message. Codes stay when words change; events.jsonl holds the code of what ended a run. In angle
brackets stands what a message fills in.

[Troubleshooting](../how-to/troubleshooting.md) begins with what one sees.
"""


class Message(NamedTuple):
    code: str
    text: str
    file: str  # from the repository's root


def messages() -> str:
    """The text of the page."""
    rooms: dict[str, list[Message]] = defaultdict(list)
    for message in sorted(read()):
        rooms[message.code[2]].append(message)
    advice = remedies()
    files = {file: _purpose(ROOT / file) for file in {message.file for room in rooms.values() for message in room}}
    parts = [HEAD]
    for digit, room in sorted(rooms.items()):
        parts.append(f"## {ROOMS[digit]}\n")
        parts += [_entry(message, files[message.file], advice.get(message.code)) for message in room]
    return "\n".join(parts)


def read() -> Iterator[Message]:
    """Every message of the source."""
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[0], ast.Constant):
                    code = node.args[0].value
                    if isinstance(code, str) and CODE.fullmatch(code):
                        text = " ".join(_words(node.args[1]).split(" "))
                        yield Message(code, text, file.relative_to(ROOT).as_posix())


def remedies() -> dict[str, str]:
    """Code -> what to do, of docs/how-to/troubleshooting.md."""
    page = (ROOT / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for row in re.findall(r"^\| .+ \|$", page, re.M):
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        for code in CODE.findall(cells[1]) if len(cells) == 3 else []:
            found[code] = f"{found[code]}; or {cells[2]}" if code in found else cells[2]
    return found


def _entry(message: Message, purpose: str, remedy: str | None) -> str:
    lines = [f"### {message.code}", "", "```text", message.text, "```", ""]
    if (key := KEY.match(message.text)) is not None:
        lines += [f"About `{key[1]}` ([keys](run-file-keys.md)).", ""]
    if remedy is not None:
        lines += ["What to do: " + LINK.sub(r"](../how-to/\1)", remedy) + ".", ""]
    return "\n".join([*lines, f"From `{message.file}`: {purpose}", ""])


def _words(node: ast.AST) -> str:
    """A text as it stands in the source, what is filled in between angle brackets."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_words(value) for value in values)
        case ast.FormattedValue(value=value):
            return _words(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _words(left) + _words(right)
        case ast.IfExp(body=body, orelse=other):
            first, second = _words(body), _words(other)
            return (
                f"<{first.strip('<>')} or {second.strip('<>')}>"
                if first.strip() and second.strip()
                else (first or second)
            )
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="join"), args=[inner]):
            return _words(inner)
        case ast.GeneratorExp(elt=part) | ast.ListComp(elt=part):
            return _words(part)
        case ast.Call(func=ast.Name(id="str" | "sorted" | "repr" | "len" | "min" | "max" | "set"), args=[inner, *_]):
            return _words(inner)
        case ast.Call(func=ast.Name(id="one_line"), args=[inner, *_]):
            return _words(inner)
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            return f"<{name.strip('_').lower().replace('_', ' ')}>"
        case ast.Call(func=ast.Attribute(value=value)) | ast.Subscript(value=value) | ast.Starred(value=value):
            return _words(value)
    return "<...>"


def _purpose(file: Path) -> str:
    """The first sentence of a file's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split())
    return re.split(r"(?<=[.:]) (?=[A-Z])", text)[0].rstrip(":")


if __name__ == "__main__":
    (ROOT / "docs/reference/messages.md").write_text(messages(), encoding="utf-8")
