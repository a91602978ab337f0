"""The path of a run from the command to its first step is short, and drawn in docs/explanation/internals.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.places import ROOT

pytestmark = pytest.mark.processes

EDGE = re.compile(r'\["(\S+)<br>(\w+)"\] (==>|-->) \w+\["(\S+)<br>(\w+)"\]')


def test_path_to_the_first_step_reads_downwards() -> None:
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


AFTER = """
import os, sys
from lockstep.cli import main
from lockstep.training import loop, train_job

there, train = set(), loop.train
train_job.train = lambda *arguments: (there.update(sys.modules), train(*arguments))[1]
main(["train", *sys.argv[1:], "output=out", "steps=2", "launch.processes=1", "launch.device=cpu"])
assert any(name.startswith("lockstep.") for name in there)
print(*sorted(name for name in sys.modules.keys() - there if name.startswith("lockstep")), file=sys.stderr)
os._exit(0)
"""
# What the end alone needs: charts and templates of the page; the strategy that the last line recommends.
OF_THE_END = ("lockstep.track.report", "lockstep.strategies.", "lockstep.training.step_record")


def test_all_modules_are_imported_before_training(tmp_path: Path) -> None:
    """A package that is upgraded while a run trains must not change what the run ends with."""
    words = ["data.limit=200", "strategy.name=single"]
    ended = subprocess.run([sys.executable, "-c", AFTER, *words], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    later = ended.stderr.splitlines()[-1].split()
    assert [name for name in later if not name.startswith(OF_THE_END)] == []
    assert "lockstep.track.report.report" in later, "the control: the end has run"
