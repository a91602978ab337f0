"""Make notebooks from the scripts in examples/ that have cells.

In: scripts with lines `# %% Title`, which editors show as cells. Out: `notebook`, the text of a notebook beside each,
which `python docs/notebooks.py` writes: the docstring and the titles as text, the rest as code.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_CELL = re.compile(r"^# %% (.*)\n", re.M)


def scripts() -> list[Path]:
    """Scripts with cells."""
    return [path for path in sorted(EXAMPLES.glob("*.py")) if _CELL.search(path.read_text(encoding="utf-8"))]


def notebook(script: Path) -> str:
    text = script.read_text(encoding="utf-8")
    tree = ast.parse(text)
    code = "".join(text.splitlines(keepends=True)[tree.body[0].end_lineno :])
    first, *rest = _CELL.split(code)
    install = "In an environment with `lockstep-train` (`%pip install lockstep-train`)."
    title = re.sub(r" `python [^`]*`.*", "", str(ast.get_docstring(tree)).splitlines()[0])
    cells = [_cell("markdown", f"# {title}\n\n{install}")]
    cells += [_cell("code", first)]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        cells += [_cell("markdown", f"## {title}"), _cell("code", body)]
    for at, cell in enumerate(cells):
        cell["id"] = f"cell-{at}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str) -> dict[str, object]:
    lines = text.strip("\n").splitlines(keepends=True)
    more: dict[str, object] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": lines, **more}


if __name__ == "__main__":
    for path in scripts():
        path.with_suffix(".ipynb").write_text(notebook(path), encoding="utf-8")
