"""Commands import few modules before they answer: torch takes over a second, transformers' models two.

`benchmarks/start.py` measures times; these tests check only which modules are imported.
"""

import argparse
import subprocess
import sys

import pytest

from lockstep import commands
from lockstep.commands import before_a_run
from lockstep.config import plugins
from lockstep.track import json_output
from support.messages import raises

TEXT = {"yaml", "pydantic", "rich"}  # what reading a run file takes
ARRAYS = {"numpy", "pyarrow"}
TENSORS = {"torch", "transformers", "datasets", "pandas", "tokenizers", "accelerate"}
SCRIPT = """
import sys
from lockstep.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit:
        pass
print(*sys.modules, file=sys.stderr)
"""


def imported(*lines: str) -> set[str]:
    """Return the top-level packages that are imported after these commands, run one after the other in one process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *lines], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stderr.splitlines()[-1].split()}


@pytest.mark.processes
def test_the_overview_imports_nothing_but_python() -> None:
    assert not imported("--help", "--version", "") & (TEXT | ARRAYS | TENSORS)


@pytest.mark.processes
def test_these_commands_import_no_arrays_and_no_tensors() -> None:
    """The commands are `--help` of each command, and those that read only lockstep's own files."""
    there = imported("list", "list --json", "schema", *(f"{name} --help" for name in commands.HELP))
    assert not there & (ARRAYS | TENSORS)
    assert there >= TEXT  # the control


@pytest.mark.parametrize("kind", list(before_a_run._KEYS))
def test_a_plug_in_is_described_as_it_is(kind: str) -> None:
    """The description is parsed without an import; class attributes resolve in Python's method resolution order."""
    attributes = before_a_run._NEEDS.get(kind, ())
    for name in plugins.names(kind):
        plugin = plugins.find(kind, name)
        summary, found = plugins.described(kind, name, *attributes)
        assert found == {each: getattr(plugin, each) for each in attributes}, name
        text = " ".join((sys.modules[plugin.__module__].__doc__ or "").split())
        assert summary, name
        assert text.startswith(summary), name


def test_an_attribute_that_is_no_literal_is_refused() -> None:
    with raises("LS1097", "single.py", error=plugins.PluginError):
        plugins.described("strategies", "single", "facts")
    with raises("LS1097", "DDP has no nothing", error=plugins.PluginError):
        plugins.described("strategies", "ddp", "nothing")


def test_list_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    before_a_run.list_arguments(parser)
    assert before_a_run.run_list(parser.parse_args(["--json"])) == 0
    answer = json_output.Answer.model_validate_json(capsys.readouterr().out)
    assert {row["name"]: row["results"] for row in answer.tables["strategies"]}["zero2"] == "same bits"
