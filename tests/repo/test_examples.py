"""The scripts in examples/, as a reader runs them, and the notebooks that are made of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.documents import script
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
def test_examples_succeed_and_print_their_result(name: str, tmp_path: Path, cache: Path) -> None:
    done = subprocess.run(
        ["python", ROOT / "examples" / name],
        cwd=tmp_path,
        env=environment(tmp_path, cache),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert WANTED[name] in done.stdout


def test_notebooks_equal_those_of_the_scripts() -> None:
    notebooks = script("notebooks")
    made = {path.with_suffix(".ipynb").name: notebooks.notebook(path) for path in notebooks.scripts()}
    assert made == {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.ipynb")}, (
        "python docs/notebooks.py writes them"
    )
    assert len(made) >= 2


def test_a_notebook_has_all_of_its_script_s_code() -> None:
    for path in (ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code").split()
        lines = path.with_suffix(".py").read_text(encoding="utf-8").splitlines()
        assert " ".join(line for line in lines if not line.startswith("# %%")).split()[-len(code) :] == code
        assert len(code) > 100


@pytest.mark.extras
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param("exactness", marks=pytest.mark.long), "first_run"])  # as a script, above
def test_a_notebook_runs(name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for variable, value in environment(tmp_path, cache).items():
        monkeypatch.setenv(variable, value)
    book = nbformat.read(ROOT / f"examples/{name}.ipynb", as_version=4)
    nbformat.validate(book)
    kernel = client.NotebookClient(book, timeout=None, resources={"metadata": {"path": str(tmp_path)}})
    kernel.create_kernel_manager()
    kernel.km.kernel_spec.argv[0] = sys.executable  # this Python, whatever kernels are installed
    kernel.execute()
    printed = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    assert WANTED[f"{name}.py"] in printed
