"""The scripts in examples/, as a reader runs them."""

import subprocess
from pathlib import Path

import pytest

from support.page_commands import environment
from support.places import ROOT

WANTED = {
    "first_run.py": "superb -> good",
    "traced.py": "likely",
    "own_module.py": "is number 1",
    "exactness.py": "killed",
}


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == WANTED.keys()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(WANTED))
def test_an_example_ends_well_and_says_so(name: str, tmp_path: Path, cache: Path) -> None:
    done = subprocess.run(
        ["python", ROOT / "examples" / name],
        cwd=tmp_path,
        env=environment(tmp_path, cache),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert WANTED[name] in done.stdout
