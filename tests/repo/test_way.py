"""The path of a run from the command to its first step is short, and drawn in docs/explanation/internals.md."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.places import ROOT

pytestmark = pytest.mark.processes

EDGE = re.compile(r'\["(\S+)<br>(\w+)"\] (==>|-->) \w+\["(\S+)<br>(\w+)"\]')


def test_the_way_to_the_first_step_can_be_read_downwards() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/way.py")]
    picture = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    edges = EDGE.findall(picture)
    way = [edges[0][0], *(below for _, _, kind, below, _ in edges if kind == "==>")]
    assert way[0] == "cli.py"
    assert way[-1] == "strategies/single.py"
    assert len(set(way)) == len(way), "a file on the way is entered twice"
    stops = [(above, below) for above, _, kind, below, _ in edges if kind == "-->"]
    assert {above for above, _ in stops} <= set(way)
    assert not {below for _, below in stops} & set(way), "a file that is left is called once more from below"
    assert len({*way, *(below for _, below in stops)}) <= 25
    page = (ROOT / "docs/explanation/internals.md").read_text()
    assert picture.strip() == page.partition("```mermaid\n")[2].partition("\n```")[0]
