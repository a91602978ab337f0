"""Every message has one code, in the range of its room, and no retired one."""

import ast
import functools
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import lockstep
from lockstep_trace.coded import CodedError, coded, codes, uncoded
from support.places import ROOT as CHECKOUT
from support.sources import Nodes, nodes

ROOT = Path(lockstep.__file__).parent
# Every file of source, and the path by which its package is imported: `launchers/start.py`, `lockstep_clouds/aws.py`.
FILES = {file: file.relative_to(ROOT) for file in sorted(ROOT.rglob("*.py"))}
FILES |= {
    file: file.relative_to(source)
    for source in sorted((CHECKOUT / "packages").glob("*/src"))
    for file in sorted(source.rglob("*.py"))
}
RANGES = {
    "": range(500),
    "track": range(500, 1000),
    "config": range(1000, 2000),
    "data": range(2000, 3000),
    "tasks": range(3000, 4000),
    "strategies": range(4000, 5000),
    # consistency_check.py came from `distributed`, step_record.py from lockstep_trace
    "training": (*range(5000, 6000), 7005, *range(9150, 9153)),
    "checkpoint": range(6000, 7000),
    "distributed": range(7000, 7200),
    "launchers": range(7200, 8000),
    "proof": (5120, *range(8000, 9000)),
    "lab": range(8000, 9000),
    "commands": range(8000, 9000),
    "lockstep_clouds": range(7200, 8000),
    "lockstep_plan": range(8000, 9000),
    "lockstep_trace": range(9000, 10000),
}
# Codes of messages that are gone: no other message takes them. One a line.
RETIRED = {
    "LS3134",
    "LS7522",
    "LS8200",
    "LS1092",
    "LS2006",
    "LS2007",
    "LS1050",
    "LS2198",
    "LS2199",
    "LS5050",
    "LS5137",
    "LS7230",
    "LS7280",
    "LS7370",
    "LS7373",
    "LS7414",
    "LS8000",
    "LS8053",
    "LS8132",
    "LS8153",
    "LS8104",
    "LS8105",
    "LS8107",
    "LS8220",
    "LS8440",
}
UNCODED = {"plain"}  # shares no code with the rest, which gives its messages codes


class Message(NamedTuple):
    place: str
    code: str | None  # None: no literal


def coded_classes() -> set[str]:
    """Return the names of all errors that take a code."""
    bases: dict[str, set[str]] = {}
    for file in FILES:
        for node in nodes(file).of(ast.ClassDef):
            bases[node.name] = {ast.unparse(base).split(".")[-1] for base in node.bases}
    found = {"CodedError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def messages(file: Nodes, names: set[str], place: str) -> list[Message]:
    """Return all calls that create a message, with their codes."""
    found = []
    for node in file.of(ast.Call):
        if getattr(node.func, "id", None) not in names and getattr(node.func, "attr", None) not in names:
            continue
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Attribute) and first.attr == "code":
            continue  # the message of an error that was caught
        code = first.value if isinstance(first, ast.Constant) else None
        found.append(Message(f"{place}:{node.lineno}", code if isinstance(code, str) else None))
    return found


@functools.cache
def all_messages() -> list[Message]:
    names = coded_classes() | {"coded"}
    return [
        message
        for file, place in FILES.items()
        if place.parts[0] not in UNCODED and place.name not in ("coded.py", "errors.py")
        for message in messages(nodes(file), names, place.as_posix())
    ]


def room_of(place: str) -> str:
    return place.partition("/")[0] if "/" in place else ""


def test_every_message_has_a_literal_code() -> None:
    found = all_messages()
    assert len(found) > 900
    assert [place for place, code in found if code is None] == []


def test_no_code_is_there_twice_or_was_retired() -> None:
    counts = Counter(code for _, code in all_messages())
    assert {code for code, count in counts.items() if count > 1} == set()
    assert counts.keys() & RETIRED == set()


def test_codes_are_in_the_range_of_their_room() -> None:
    assert {
        (place, code)
        for place, code in all_messages()
        if code is None or code[:2] != "LS" or len(code) != 6 or int(code[2:]) not in RANGES[room_of(place)]
    } == set()


def test_the_control_a_message_without_a_code_is_seen() -> None:
    file = Nodes("raise RunError(f'{key}: missing')\nraise errors.RunError('LS1000', 'no')\nRunError(error.code, '')")
    assert messages(file, {"RunError"}, "a.py") == [Message("a.py:1", None), Message("a.py:2", "LS1000")]


def test_every_error_that_the_user_reads_has_a_code() -> None:
    """Printed errors are coded texts, or texts of errors that have a code."""
    found = []
    for file, place in FILES.items():
        names = {
            alias.asname or alias.name
            for node in nodes(file).of(ast.ImportFrom)
            if node.module == "lockstep.track.console"
            for alias in node.names
            if alias.name == "error"
        }
        found += [
            f"{place}:{node.lineno}"
            for node in (nodes(file).of(ast.Call) if names else ())
            if ast.unparse(node.func) in names and isinstance(node.args[0], (ast.Constant, ast.JoinedStr, ast.BinOp))
        ]
    assert found == []


def test_a_code_is_at_the_end_of_the_first_line() -> None:
    error = CodedError("LS1000", "no such key\n  a row")
    assert str(error) == "no such key [LS1000]\n  a row"
    assert (error.code, error.message) == ("LS1000", "no such key\n  a row")
    assert uncoded(str(error)) == error.message
    assert codes(str(error)) == ["LS1000"]


def test_wrapping_message_has_its_own_code() -> None:
    inner = coded("LS1000", "no such key")
    assert coded("LS1000", f"run.yaml: {inner}") == "run.yaml: no such key [LS1000]"
    assert coded("LS2000", f"run.yaml: {inner}") == "run.yaml: no such key [LS2000]"
    assert CodedError.read(f"trial 3: {inner}").code == "LS1000"


def test_an_error_of_a_plug_in_may_have_no_code() -> None:
    error = CodedError("no such key")
    assert (error.code, error.message, str(error)) == ("", "no such key", "no such key")
