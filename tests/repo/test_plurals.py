"""Numbers have the right form of their noun in every message and page."""

import re

import pytest

from lockstep_trace.coded import quantity
from support.places import ROOT

# "process(es)", "step(s)": a noun of a message, not a call such as `of(s)`.
CRUTCH = re.compile(
    r"\b(?:batch|card|column|configuration|core|device|epoch|example|file|folder|job|key|line|machine|micro-batch|node|"
    r"process|rank|replica|restart|round|row|run|sample|shard|split name|path|start|step|target|text|thread|time|token|"
    r"trial|weight|worker|GPU|CPU)\(e?s\)"
)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        *((1, "process", "1 process"), (2, "process", "2 processes"), (0, "row", "0 rows"), (1.0, "step", "1 step")),
        *((1234, "row", "1,234 rows"), (3, "batch", "3 batches"), (2, "entry", "2 entries"), (2, "key", "2 keys")),
        ("0.5", "epoch", "0.5 epochs"),
        *(("auto", "process", "auto processes"), ("1", "time", "1 time")),
    ],
)
def test_quantities_have_singular_or_plural_nouns(count: float | str, noun: str, text: str) -> None:
    assert quantity(count, noun) == text


def test_no_message_leaves_the_plural_to_the_reader() -> None:
    files = [
        *(file for room in ("src", "packages", "docs") for file in (ROOT / room).rglob("*")),
        ROOT / "README.md",
    ]
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in files
        if file.suffix in {".py", ".md", ".html", ".js", ".sh"} and file.is_file()
        for match in CRUTCH.finditer(file.read_text())
    ]
    assert found == []
    assert CRUTCH.search("2 process(es)")  # the control
