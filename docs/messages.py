"""Every message that lockstep prints, by its code, from the source.

In: calls such as `RunError("LS2031", f"...")` in src/lockstep and packages/; the table of
docs/how-to/troubleshooting.md, which says what to do about the commonest; docs/codes/*.yaml, which explain those that
users meet most (why, example, fix); docs/texts.yaml; the tables of keys and of words. Out: `messages()`, the text of
the site's page reference/messages.md, which docs/site.py writes; `code_pages()`, one text with a section for each code,
which docs/publish.py splits into a page for each. `python docs/messages.py LS1000` prints an entry, without arguments
the page. Imports nothing from lockstep.
"""

from __future__ import annotations

import ast
import functools
import posixpath
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from support import key_table  # noqa: E402 - tests are no package that is installed
from support.sources import Nodes, nodes  # noqa: E402

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
PART = re.compile(r"<[^<>]*>")  # a part that a message fills in
FEW = 2  # words of its own below which a message is read where it is composed
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
KEY = re.compile(r"^([a-z_]+(?:\.[a-z0-9_]+)*)[.:]")
DOTTED = re.compile(r"(?<![\w./<-])[a-z_]+(?:\.[a-z0-9_]+)+")
REFERENCE, CODE_PAGES = "reference", "reference/messages/all"  # folders below docs/
MESSAGES, KEY_PAGE = "reference/messages.md", "reference/run-file-keys.md"  # below docs/; docs/site.py writes them
EVERYDAY = {"run", "example", "export"}  # words of the glossary that are also everyday words
HEAD = """---
hide: [toc]
---

# Messages

A message ends its first line with its code. Each code has a page of its own, `reference/messages/LS2031/`. `--verbose`,
or `LOCKSTEP_VERBOSE=1` in the environment, prints the address of each code under the message. A code stays when the
words of its message change. `events.jsonl` holds the code of the error that ended a run. Angle brackets mark the parts
that a message fills in. In a clone, `python docs/messages.py LS2031` prints an entry.

[Troubleshooting](../how-to/troubleshooting.md) lists the most frequent ones by symptom.
"""


class Message(NamedTuple):
    code: str
    text: str
    file: str  # relative to the repository's root


def messages() -> str:
    """Text of the page of all messages."""
    rooms: dict[str, list[Message]] = defaultdict(list)
    for message in read():
        rooms[message.code[2]].append(message)
    advice, files = remedies(REFERENCE), _purposes(message for room in rooms.values() for message in room)
    parts = [HEAD]
    for digit, room in sorted(rooms.items()):
        parts.append(f"## {ROOMS[digit]}\n")
        parts += [_entry(message, files[message.file], advice.get(message.code)) for message in room]
    return "\n".join(parts)


def entries(codes: Collection[str]) -> str:
    """Entries of some codes, with links from docs/reference/; exits if a code does not exist."""
    every = {message.code: message for message in read()}
    if unknown := [code for code in codes if code not in every]:
        sys.exit(f"docs/messages.py: no message has the code {', '.join(unknown)}")
    files, advice = _purposes(every[code] for code in codes), remedies(REFERENCE) | explanations(REFERENCE)
    return "\n".join(_entry(every[code], files[every[code].file], advice.get(code)) for code in codes)


def code_pages() -> str:
    """One section per code, with links from reference/messages/CODE/."""
    every = read()
    advice, files, words = remedies(CODE_PAGES) | explanations(CODE_PAGES), _purposes(every), _words_explained()
    keys = [*key_table.KEYS]
    keys += sorted({key.partition(".")[0] for key in keys if "." in key})
    sections = set(re.findall(r"^## `(\w+)`$", (ROOT / "docs/reference/run-file.md").read_text(encoding="utf-8"), re.M))
    parts = ["---\nhide: [navigation, toc]\n---\n\n# Messages by code\n"]
    for message in every:
        parts += [f"## {message.code}\n", f"```text\n{message.text}\n```\n"]
        if message.code in advice:
            parts.append(f"{advice[message.code]}\n")
        parts += [_key(key, sections) for key in keys_of(message.text, keys)]
        room = ROOMS[message.code[2]]
        place = f"[{room}](../../messages.md#{re.sub('[^a-z ]', '', room.lower()).replace(' ', '-')})"
        parts.append(f"Raised in `{message.file}` ({place}): {files[message.file]}\n")
        if (named := words_of(message.text, words)) != []:
            parts.append("Words of the [glossary](../../glossary.md):\n")
            parts.append("\n".join(f"- **{word}**: {words[word]}" for word in named) + "\n")
    return "\n".join(parts)


def keys_of(text: str, keys: Collection[str]) -> list[str]:
    """Keys of the run file that a message names, in order."""
    first = KEY.match(text)
    named = [*([first[1]] if first is not None else []), *DOTTED.findall(text)]
    return [key for key in dict.fromkeys(named) if key in keys]


def words_of(text: str, words: Collection[str]) -> list[str]:
    """Words of the glossary that a message uses; if one contains another, only the longer."""
    found = [word for word in words if re.search(rf"(?<![\w.-]){re.escape(word)}s?(?![\w.-]\w)\b", text, re.I)]
    return [word for word in found if not any(word != other and word in other for other in found)]


def _key(key: str, sections: Collection[str]) -> str:
    section = key.partition(".")[0]
    anchor = f"#{section}" if section in sections else "#top-level" if "." not in key else ""
    links = [f"[the run file](../../run-file.md{anchor})", "[what each key changes](../../run-file-keys.md)"]
    links += ["[the tasks](../../tasks.md)"] if section == "task" else []
    return f"About `{key}`: {', '.join(links)}.\n"


def _words_explained() -> dict[str, str]:
    """Word -> meaning, with links from reference/messages/CODE/."""
    meanings = {}
    for words, meaning in _rows("glossary.md").items():
        for word in words.split(", "):
            if word not in EVERYDAY and word.islower():
                meanings[word] = _moved(meaning, "reference", CODE_PAGES)
    return meanings


def _rows(page: str) -> dict[str, str]:
    """First cell, without its quotes -> second cell, of the tables of a page of reference."""
    text = (ROOT / "docs/reference" / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|.*$(?!\n\|-)", text, re.M)  # a table's head has a line below it
    return {first.strip("`"): second for first, second in rows}


@functools.cache
def read() -> tuple[Message, ...]:
    """All messages of the source, sorted by code."""
    return tuple(
        sorted(message for folder in SOURCES for file in (ROOT / folder).rglob("*.py") for message in _of(file))
    )


def _of(file: Path) -> Iterator[Message]:
    """Messages of one file."""
    if CODE.search(file.read_text(encoding="utf-8")) is None:
        return
    tree = nodes(file)
    for node in tree.of(ast.Call):
        if len(node.args) > 1 and isinstance(node.args[0], ast.Constant):
            code = node.args[0].value
            if isinstance(code, str) and CODE.fullmatch(code):
                text = " ".join(_words(node.args[1]).split(" "))
                if len(re.findall("[a-z]{3,}", PART.sub("", text), re.I)) < FEW:
                    text = _patterns().get(code) or _composed(node, tree) or text
                yield Message(code, text, file.relative_to(ROOT).as_posix())


@functools.cache
def _patterns() -> dict[str, str]:
    """Code -> text, of messages that cannot be read where they are raised."""
    texts: dict[str, str] = yaml.safe_load((ROOT / "docs/texts.yaml").read_text(encoding="utf-8"))
    return texts


def _composed(call: ast.Call, tree: Nodes) -> str | None:
    """Text of a message that a variable, a constant or a function of one string expression holds; None if there is no
    such text."""
    texts = [_words(value) for value in _values(call.args[1], call, tree)]
    texts = [text for text in dict.fromkeys(texts) if len(re.findall("[a-z]{3,}", PART.sub("", text), re.I)) >= FEW]
    return "\n".join(texts) or None


def _values(node: ast.expr, call: ast.Call, tree: Nodes) -> Iterator[ast.expr]:
    """String expressions that a variable of the calling function, a constant, or a function may have as value."""
    match node:
        case ast.Name(id=name):
            yield from _assigned(name, call, tree)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="join"), args=[ast.List(elts=parts)]):
            for part in (part for part in parts if not isinstance(part, ast.Starred)):
                for value in [*_values(part, call, tree)][:1] or [part]:
                    yield value
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            for definition in _functions(name, tree):
                returned = [each.value for each in ast.walk(definition) if isinstance(each, ast.Return)]
                yield from (value for value in returned if value is not None)
        case ast.JoinedStr(values=values):
            for inner in (value.value for value in values if isinstance(value, ast.FormattedValue)):
                for value in _values(inner, call, tree):
                    yield ast.JoinedStr([value if _holds(each, inner) else each for each in values])


def _holds(part: ast.expr, inner: ast.expr) -> bool:
    """Whether a part of a formatted string is that of an expression."""
    return isinstance(part, ast.FormattedValue) and part.value is inner


def _assigned(name: str, call: ast.Call, tree: Nodes) -> list[ast.expr]:
    """The value last assigned to a name before a call in its function, else to a constant of any file."""
    inside = [n for n in tree.of(ast.FunctionDef) if n.lineno <= call.lineno <= (n.end_lineno or n.lineno)]
    scope: ast.AST = inside[-1] if inside else tree.tree
    before = [n for n in ast.walk(scope) if isinstance(n, ast.Assign | ast.NamedExpr) and n.lineno <= call.lineno]
    values = [n.value for n in before if name in {t.id for t in _targets(n) if isinstance(t, ast.Name)}]
    if values:
        last = values[-1]
        return [last, *_values(last, call, tree)] if not isinstance(last, ast.Name) else []
    return _constants(name, tree)


def _targets(node: ast.Assign | ast.NamedExpr) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _functions(name: str, tree: Nodes) -> list[ast.AST]:
    """The function of a name: of this file, else of the only other file that has one."""
    here = _named(name, tree)
    others = [] if here else [file for file, text in _texts().items() if f"def {name}(" in text]
    here = _named(name, nodes(others[0])) if len(others) == 1 else here
    return here if len(here) == 1 else []


def _named(name: str, tree: Nodes) -> list[ast.AST]:
    return [node for node in tree.of(ast.FunctionDef) if node.name == name]


def _constants(name: str, tree: Nodes) -> list[ast.expr]:
    """The value of a module's constant: of this file, else of the only other file that has one of this name."""
    here = _bound(name, tree)
    others = [] if here else [file for file, text in _texts().items() if f"\n{name} = " in text]
    return _bound(name, nodes(others[0])) if len(others) == 1 else here


def _bound(name: str, tree: Nodes) -> list[ast.expr]:
    assigned = [node for node in tree.tree.body if isinstance(node, ast.Assign)]
    return [each.value for each in assigned if isinstance(t := each.targets[0], ast.Name) and t.id == name]


@functools.cache
def _texts() -> dict[Path, str]:
    files = (file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py")))
    return {file: file.read_text(encoding="utf-8") for file in files}


def remedies(folder: str) -> dict[str, str]:
    """Map codes to the advice in docs/how-to/troubleshooting.md, with links from a folder of docs/."""
    page = (ROOT / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for row in re.findall(r"^\| .+ \|$", page, re.M):
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        for code in CODE.findall(cells[1]) if len(cells) == 3 else []:
            advice = _moved(cells[2], "how-to", folder)
            found[code] = f"{found[code]}; or {advice}" if code in found else advice
    return {code: f"What to do: {advice}." for code, advice in found.items()}


def explanations(folder: str) -> dict[str, str]:
    """Code -> why, example and fix, of docs/codes/, with links from a folder of docs/."""
    texts = {}
    for code, parts in explained().items():
        lines = [f"**{part.capitalize()}.** {' '.join(text.split())}" for part, text in parts.items()]
        texts[code] = _moved("\n\n".join(lines), "codes", folder)
    return texts


@functools.cache
def explained() -> dict[str, dict[str, str]]:
    """Code -> part (why, example, fix) -> text, of docs/codes/."""
    files = sorted((ROOT / "docs/codes").glob("*.yaml"))
    return {code: parts for file in files for code, parts in yaml.safe_load(file.read_text(encoding="utf-8")).items()}


def _entry(message: Message, purpose: str, remedy: str | None) -> str:
    lines = [f"### {message.code}", "", "```text", message.text, "```", ""]
    if (key := KEY.match(message.text)) is not None:
        lines += [f"About `{key[1]}` ([keys](run-file-keys.md)).", ""]
    if remedy is not None:
        lines += [remedy, ""]
    return "\n".join([*lines, f"From `{message.file}`: {purpose}", ""])


def _words(node: ast.AST) -> str:
    """Text of a string expression, with placeholders in angle brackets."""
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
        case ast.Call(func=ast.Name(id="one_line") | ast.Attribute(value=ast.Name(id="shlex")), args=[inner, *_]):
            return _words(inner)
        case ast.Name(id="error" | "caught" | "cause" | "fault"):
            return "<the error>"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self" | "side_effects" | "failures"), attr=name)):
            return f"<{name.strip('_').replace('_', ' ')}>"
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            return f"<{name.strip('_').lower().replace('_', ' ')}>"
        case ast.Call(func=ast.Attribute(value=value)) | ast.Subscript(value=value) | ast.Starred(value=value):
            return _words(value)
    return "<...>"


def _moved(text: str, home: str, folder: str) -> str:
    """Adapt the links of a text to another folder of docs/."""
    return LINK.sub(lambda link: posixpath.relpath(posixpath.join(home, link[1]), folder), text)


def _purposes(every: Iterable[Message]) -> dict[str, str]:
    return {file: _purpose(ROOT / file) for file in {message.file for message in every}}


def _purpose(file: Path) -> str:
    """First sentence of a file's docstring."""
    text = " ".join((ast.get_docstring(nodes(file).tree) or "").split())
    return re.split(r"(?<=[.:]) (?=[A-Z])", text)[0].rstrip(":")


if __name__ == "__main__":
    print(entries(sys.argv[1:]) if sys.argv[1:] else messages())
