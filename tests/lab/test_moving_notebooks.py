"""`lockstep init --from NOTEBOOK.ipynb`."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.config.run import RunError
from lockstep.lab.import_config.notebooks import read
from support.moving_scripts import SCRIPT, moved, refused

WORDS = ("task.text=text", "launch.processes=1", "--partial")


def notebook(*cells: str, counts: Sequence[int | None] | None = None, language: str = "python") -> str:
    numbers = counts or [None] * len(cells)
    code = [
        {"cell_type": "code", "source": cell.splitlines(True), "execution_count": number}
        for cell, number in zip(cells, numbers, strict=True)
    ]
    text = {"cell_type": "markdown", "source": ["# Title\n", "!rm -rf\n"]}
    return json.dumps({"cells": [text, *code], "metadata": {"kernelspec": {"language": language}}})


def test_lines_of_a_notebook_that_are_no_python() -> None:
    for cell, gap, dropped, rest in (
        ("!pip install -q x\n%matplotlib inline\nx = 1", "", "", "x = 1"),
        ("if x:\n    !pip install y\n    y = 2", "", "", "if x:\n    pass\n    y = 2"),
        ("%%time\nx = 1", "", "", "x = 1"),
        ("%%capture out\n!pip install x\nx = 1", "", "", "x = 1"),
        ("%time x.train()", "", "", "x.train()"),
        ("model?\n?model\nx = 1", "", "", "x = 1"),
        ("%%html\n<b>x = 1</b>", "", "", ""),
        ("%env A=1", "", "", "os.environ['A'] = '1'"),
        ("%set_env A 1 2", "", "", "os.environ['A'] = '1 2'"),
        ("!wget http://a/b.csv\nx = 1", "", "!wget", "x = 1"),
        ("!git clone a\nx = 1", "", "!git", "x = 1"),
        ("!sed -i s/a/b/ data.csv", "!sed", "", ""),
        ("!pip install x; rm data.csv", "!pip install x; rm", "", ""),
        ("!cat a.csv > b.csv", "!cat a.csv > b", "", ""),
        ("!accelerate launch train.py", "!accelerate", "", ""),
        ("%run setup.py", "%run", "", ""),
        ("%cd data", "%cd", "", ""),
        ("%timeit x.train()", "%timeit", "", ""),
        ("%%bash\nrm a", "%%bash", "", ""),
        ("%%writefile a.py\nx = 1", "%%writefile", "", ""),
        ("files = !ls", "files = !ls", "", ""),
        ("!pip install x\ntext = '''\n!pip\n'''", "cell 1", "", ""),
        ("text = '''\n!pip\n%run\n'''", "", "", "!pip\n%run"),
    ):
        made = read(Path("a.ipynb"), notebook(cell))
        assert [gap in name for name, _ in made.gaps] == ([True] if gap else []), cell
        assert [dropped in name for name, _ in made.dropped] == ([True] if dropped else []), cell
        assert rest in made.text, cell
        assert len(made.text.splitlines()) == len(cell.splitlines())  # lines keep their places
    assert "import display" in read(Path("a.ipynb"), notebook("display(1)")).text


def test_cells_that_ran_in_another_order_are_refused() -> None:
    for counts, note in (((None, None), ""), ((1, 2), ""), ((1, 4), "ran several times"), ((1, None), "have not run")):
        notes = read(Path("a.ipynb"), notebook("x = 1", "x = 2", counts=counts)).notes
        assert note in "\n".join(notes)
        assert len(notes) == 1 + bool(note)
    for text, code in (
        (notebook("x = 1", "x = 2", counts=(2, 1)), "LS8557"),
        (notebook("x = 1", language="R"), "LS8556"),
        ("{}", "LS8558"),
        ("no JSON", "LS8558"),
        ('{"cells": [{"cell_type": "code"}]}', "LS8558"),
    ):
        with pytest.raises(RunError) as error:
            read(Path("a.ipynb"), text)
        assert error.value.code == code


def test_a_notebook_becomes_a_run_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, loop = SCRIPT.split("\nfor epoch in", 1)
    cells = ["!pip install -q transformers\nimport os", head, f"%%time\nfor epoch in{loop}"]
    run = moved("train.ipynb", notebook(*cells), *WORDS)
    assert (run.epochs, run.batch_size, run.optim.learning_rate) == (3, 8, 2e-5)
    told = capsys.readouterr().out
    assert "the first line of cell 1: 1, 2: 4, 3:" in told
    Path("moved.yaml").unlink()
    for cell, why in (
        ("%run tune.py", "cell 3: %run tune.py"),
        ("optimizer.param_groups[0]['lr'] = 1", "param_groups"),
    ):
        assert why in refused("train.ipynb", notebook(cells[0], head, cell, cells[2]), capsys), cell
