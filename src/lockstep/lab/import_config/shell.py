"""Commands of a shell script, with the words that the shell gives them.

In: the text of a script. Out: its simple commands in order, each with its line and its words after quoting, expansion
of variables and removal of redirections. A variable that is known only when the script runs (the output of a command,
a value of another branch, of a loop, or of another file) stays as it is written, with its `$`. Nothing is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z_]\w*")
_SET = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPERATOR = re.compile(r"\|\||&&|;;&?|;&|\|&|[;&|()]")
_REDIRECTION = re.compile(r"\d*(?:&>>?|<<<|<<-?|[<>]&|<>|>\||>>|[<>])")
_EXPANDED = re.compile(r"\$(?:(\w+)|\{(\w+)(\[[@*]\])?(?::?([-=])([^{}]*))?\})")
_SUM = re.compile(r"[\d\s+*%()-]{1,40}")
_OPENING = ("if", "while", "until", "for", "select", "case", "{")
_LOOPS = ("while", "until", "for", "select")
_NEXT = ("then", "do", "else", "elif", "!", "function")
_CLOSING = ("fi", "done", "esac", "}")
_DECLARING = ("export", "readonly", "declare", "typeset", "local")
_ASSIGNING = ("read", "mapfile", "readarray", "getopts", "let", "printf")
_NO_SETTINGS = ("activate", "conda.sh", ".bashrc", ".bash_profile", ".profile", ".zshrc", "setvars.sh")


@dataclass
class Line:
    """A simple command. `repeated`: it stands in a loop."""

    number: int
    words: list[str]
    repeated: bool


def commands(text: str) -> list[Line]:
    """Return the simple commands of a script."""
    script = _Script(text.replace("\r\n", "\n"))
    while script.at < len(script.text):
        script.read()
    script.end_command()
    return script.lines


class _Script:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.lines: list[Line] = []
        self.values: dict[str, str | list[str]] = {}
        self.unknown: set[str] = set()  # variables that have a value which only a run shows
        self.blocks: list[tuple[str, set[str]]] = []  # its first word, and the variables that it assigns
        self.documents: list[str] = []  # ends of the here-documents of this line
        self.words: list[str] = []
        self.assigned: list[tuple[str, bool, str | list[str]]] = []
        self.begin: int | None = None

    # -- commands ------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the next word, operator or redirection."""
        here = self.text[self.at]
        if self.text.startswith("\\\n", self.at):
            self.at += 2
        elif here == "\n":
            self.end_command()
            self.at += 1
            for end in self.documents:
                match = re.compile(rf"^\t*{re.escape(end)}$", re.M).search(self.text, self.at)
                self.at = len(self.text) if match is None else match.end()
            self.documents = []
        elif here in " \t":
            self.at += 1
        elif here == "#":
            self.at = self._find("\n", self.at)
        elif match := _REDIRECTION.match(self.text, self.at):
            self._redirect(match)
        elif match := _OPERATOR.match(self.text, self.at):
            self._operate(match[0])
        else:
            self._word()

    def _find(self, what: str, begin: int) -> int:
        place = self.text.find(what, begin)
        return len(self.text) if place < 0 else place

    def _redirect(self, mark: re.Match[str]) -> None:
        self.at = mark.end()
        if self.text.startswith("(", self.at):  # <(a command), a file
            self.words.append(f"${mark[0]}{self._enclosed()}")
            return
        while self.text.startswith((" ", "\t"), self.at):
            self.at += 1
        target = self._parts(False)
        if mark[0].endswith(("<<", "<<-")):
            self.documents += target

    def _enclosed(self) -> str:
        """Read a text up to the bracket that closes the one here."""
        begin, depth = self.at, 0
        while self.at < len(self.text):
            depth += {"(": 1, ")": -1, "{": 1, "}": -1}.get(self.text[self.at], 0)
            self.at += 1
            if not depth:
                break
        return self.text[begin : self.at]

    def _operate(self, mark: str) -> None:
        if mark == "(" and not self.words and self.text.startswith("((", self.at):
            self._forget(_NAME.findall(self._enclosed()))
            return
        inside = self.blocks[-1][0] if self.blocks else ""
        if self.words and (mark == "(" or (mark, inside) == (")", "case")):
            self.words = []  # NAME() of a function, a pattern of case
        self.end_command()
        if mark == "(" and not self.text.startswith("()", self.at):
            self.blocks.append((mark, set()))
        elif (mark, inside) == (")", "("):
            self._forget(self.blocks.pop()[1])
        elif mark.startswith((";;", ";&")) and self.blocks:
            self._forget(self.blocks[-1][1])
        self.at += len(mark)

    def _word(self) -> None:
        self.begin = self.at if self.begin is None else self.begin
        if not self.words and (match := _SET.match(self.text, self.at)):
            self.at = match.end()
            array = self.text.startswith("(", self.at)
            value: str | list[str] = self._elements() if array else "".join(self._parts(False))
            self.assigned.append((match[1], bool(match[2]), value))
            return
        begin = self.at
        parts = self._parts(True)
        if self.words or self.assigned or not self._divides(self.text[begin : self.at]):
            self.words += parts

    def _elements(self) -> list[str]:
        """Read (the elements of an array)."""
        values: list[str] = []
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                self.at = self._find("\n", self.at)
            elif self.text[self.at] in " \t\n;&|<>(":
                self.at += 1
            else:
                values += self._parts(True)
        self.at += 1
        return values

    def _divides(self, word: str) -> bool:
        """Return whether a word begins, divides or ends a block, which makes the values in it unknown outside."""
        if word in _OPENING:
            self.blocks.append((word, set()))
            if word in ("for", "select") and (match := _NAME.search(self.text, self.at)):
                self._forget([match[0]])
            elif word == "case":
                self.at = min(self._find(" in\n", self.at), self._find(" in ", self.at)) + 3
        elif word in ("else", "elif") and self.blocks:
            self._forget(self.blocks[-1][1])
        elif word in _CLOSING and self.blocks:
            self._forget(self.blocks.pop()[1])
        return word in (*_OPENING, *_NEXT, *_CLOSING)

    def end_command(self) -> None:
        """Carry out what a command does to variables, and add it to the others."""
        name = self.words[0] if self.words else ""
        for each in self.assigned if not self.words else ():
            self._assign(*each)
        if name in _DECLARING:
            plain = all(set(each[1:]) <= set("xrg") for each in self.words if each.startswith("-"))
            for word in self.words[1:]:
                if match := _SET.match(word):
                    self._assign(match[1], bool(match[2]), word[match.end() :])
                    self._forget([] if plain else [match[1]])
        elif name in _ASSIGNING:
            self._forget(_NAME.findall(" ".join(self.words[1:])))
        elif name == "unset":
            self._forget(self.words[1:])
            self.unknown -= {*self.words[1:]}
        elif name in ("source", ".", "eval") and self.words[-1].rpartition("/")[2] not in _NO_SETTINGS:
            self._forget([*self.values])
        if self.words:
            begin = self.at if self.begin is None else self.begin
            repeated = any(word in _LOOPS for word, _ in self.blocks)
            self.lines.append(Line(self.text.count("\n", 0, begin) + 1, self.words, repeated))
        self.words, self.assigned, self.begin = [], [], None

    # -- variables -----------------------------------------------------------------------------------------------------

    def _assign(self, name: str, adds: bool, value: str | list[str]) -> None:
        old = self.values.get(name)
        other = adds and (name in self.unknown or (old is not None and type(old) is not type(value)))
        self._forget([name])
        if other or (isinstance(value, str) and "$" in value):
            return
        self.unknown.discard(name)
        self.values[name] = old + value if adds and old is not None else value  # type: ignore[operator]

    def _forget(self, names: Iterable[str]) -> None:
        for name in [*names]:
            for _, assigned in self.blocks:
                assigned.add(name)
            self.values.pop(name, None)
            self.unknown.add(name)

    def _expand(self, quoted: bool) -> list[str]:
        """Read a `$`: the words of a variable, a sum, or the text itself if only a run shows it."""
        match = _EXPANDED.match(self.text, self.at)
        if match is None:
            return [self._unexpanded()]
        self.at = match.end()
        name, every, other = match[1] or match[2], match[3], match[5]
        value = self.values.get(name)
        plain = other is not None and "$" not in other and not re.search(r"[\"'].*\s|\s.*[\"']", other)
        if value is None and name not in self.unknown and plain:
            value = other if quoted else other.strip("\"'")
            if match[4] == "=":
                self._assign(name, False, value)
        if value is None:
            return [match[0]]
        if isinstance(value, list):
            value = value if every else value[:1]
            if quoted and every == "[@]":
                return value
            value = " ".join(value)
        return [value] if quoted else value.split()

    def _unexpanded(self) -> str:
        begin = self.at
        self.at += 1
        if self.text.startswith(("(", "{"), self.at):
            written = self._enclosed()
            inner = re.sub(
                r"\$?\{?([A-Za-z_]\w*)\}?", lambda each: str(self.values.get(each[1], each[0])), written[2:-2]
            )
            if written.startswith("((") and _SUM.fullmatch(inner) and "**" not in inner:
                try:
                    return str(_sum(ast.parse(inner.strip(), mode="eval").body))
                except (SyntaxError, ValueError, ZeroDivisionError):
                    pass
        elif self.text.startswith("'", self.at):  # $'a\n'
            self.at = self._find("'", self.at + 1) + 1
        elif self.at < len(self.text) and self.text[self.at] in "@*#?$!-":
            self.at += 1
        return self.text[begin : self.at]

    # -- words ---------------------------------------------------------------------------------------------------------

    def _parts(self, split: bool) -> list[str]:
        """Read one word of the script: the words that it becomes. `split`: at blanks of variables that have no quotes
        around them."""
        parts: list[str] = []
        text, any_text = "", False
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;&|()<>":
            here = self.text[self.at]
            if here == "'":
                end = self._find("'", self.at + 1)
                text, any_text, self.at = text + self.text[self.at + 1 : end], True, end + 1
            elif here in '"$`':
                inside = self._quoted() if here == '"' else self._unquoted(split)
                any_text |= here == '"' and inside != []
                if inside:
                    parts += [text + inside[0], *inside[1:]] if len(inside) > 1 else []
                    text = parts.pop() if len(inside) > 1 else text + inside[0]
            elif here == "\\":
                text += "" if self.text.startswith("\\\n", self.at) else self.text[self.at + 1 : self.at + 2]
                self.at += 2
            else:
                text, self.at = text + here, self.at + 1
        return [*parts, text] if text or any_text else parts

    def _unquoted(self, split: bool) -> list[str]:
        if self.text[self.at] == "$":
            return self._expand(not split)
        begin, self.at = self.at, self._find("`", self.at + 1) + 1
        return [f"${self.text[begin : self.at]}"]

    def _quoted(self) -> list[str]:
        """Read a text in double quotes. "${ARRAY[@]}" is its elements, none if it is empty."""
        parts, self.at = [""], self.at + 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            here = self.text[self.at]
            if here == "$":
                only = self.text[self.at - 1] == '"'
                inside = self._expand(True)
                if not inside and only and self.text.startswith('"', self.at):
                    parts = []
                elif inside:
                    parts = [*parts[:-1], parts[-1] + inside[0], *inside[1:]]
            elif here == "`":
                begin, self.at = self.at, self._find("`", self.at + 1) + 1
                parts[-1] += f"${self.text[begin : self.at]}"
            elif here == "\\" and self.text[self.at + 1 : self.at + 2] in '"$`\\\n':
                parts[-1] += self.text[self.at + 1 : self.at + 2].strip("\n")
                self.at += 2
            else:
                parts[-1] += here
                self.at += 1
        self.at += 1
        return parts


def _sum(node: ast.AST) -> int:
    """Return the value of an expression of whole numbers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_sum(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        left, right = _sum(node.left), _sum(node.right)
        return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]
    raise ValueError(ast.unparse(node))
