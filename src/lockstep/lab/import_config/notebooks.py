"""A Jupyter notebook as a script: its code cells, one after another.

In: the text of an .ipynb file. Out: a script without the lines that are no Python (`%matplotlib inline`, `!pip
install`), notes on them, and a gap for each line whose effect on the training is unknown. Nothing is executed.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.run import RunError
from lockstep.lab.import_config.table import NAMES, RunDraft

_UNKNOWN = "init does not know what this line of the notebook does to the training: write it as Python, or remove it"
_BEFORE = "lockstep runs no commands: run it before the training if the run needs it"
_RUN = re.compile(r"^(\s*)(%time\s+|%env\s+|%set_env\s+|[%!?])(.*)$")
_VARIABLE = re.compile(r"^(\w+)(?:\s*=\s*|\s+)(.+)$")
_HELP = re.compile(r"^\s*[\w.]+\?{1,2}\s*$")


@dataclass
class Notebook:
    """`text`: the script. `gaps`, `dropped`: lines that are not in it, with the reason."""

    text: str = ""
    notes: list[str] = field(default_factory=list)
    gaps: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)

    def add(self, draft: RunDraft) -> None:
        """Say in the draft what is not in the script."""
        draft.notes += self.notes
        for name, why in self.gaps:
            draft.unclear(name, why)
        for name, why in self.dropped:
            draft.drop(name, None, why)


def read(path: Path, text: str) -> Notebook:
    """Return a notebook's script. Errors: `RunError` for a file that is no notebook of Python, and for cells that ran
    in another order than they stand."""
    try:
        whole = json.loads(text)
        cells = [(each, "".join(each["source"])) for each in whole["cells"] if each["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RunError("LS8558", f"--from: {path} is no notebook that init can read: it has no list of cells") from None
    language = (whole.get("metadata") or {}).get("kernelspec", {}).get("language", "python")
    if language != "python":
        raise RunError("LS8556", f"--from: {path} is a notebook of {language}; init reads those of Python")
    notebook = Notebook()
    _check_order(path, [each for each, source in cells if source.strip()], notebook)
    lines, starts = list[str](), list[str]()
    for number, (_, source) in enumerate(cells, 1):
        starts.append(f"{number}: {len(lines) + 1}")
        lines += [*_python(number, source.splitlines(), notebook), ""]
    notebook.text = "\n".join(lines)
    if re.search(r"\bdisplay\(", notebook.text) and "import display" not in notebook.text:
        notebook.text += "\nfrom IPython.display import display\n"
    places = ", ".join(starts if len(starts) <= 30 else [*starts[:30], "..."])
    notebook.notes.append(f"lines are counted over the code cells; the first line of cell {places}")
    return notebook


def _check_order(path: Path, cells: list[Any], notebook: Notebook) -> None:
    counts = [each.get("execution_count") for each in cells]
    known = [each for each in counts if isinstance(each, int)]
    if known != sorted(set(known)):
        raise RunError(
            "LS8557",
            f"--from: the cells of {path} ran in another order than they stand ({', '.join(map(str, known))}), so "
            "their values are not those of the code from top to bottom: restart the kernel, run all cells, and save it",
        )
    if known and known[-1] > len(known):
        notebook.notes.append("numbers of cells are missing, so some ran several times; init reads each once, in order")
    if known and len(known) < len(counts):
        notebook.notes.append("some cells have not run in this notebook; init reads them like the others")


def _python(number: int, lines: list[str], notebook: Notebook) -> list[str]:
    """Return the lines of a cell as Python, as many as before."""
    try:
        ast.parse("\n".join(lines))
        return lines
    except (SyntaxError, ValueError):
        pass
    first = next((i for i, each in enumerate(lines) if each.strip()), 0)
    head = lines[first].strip() if lines else ""
    if head.startswith("%%"):
        name = head[2:].split(maxsplit=1)[0] if head[2:].strip() else ""
        if name in NAMES["notebook_texts"]:
            return [""] * len(lines)
        if name not in NAMES["notebook_cells"]:
            notebook.gaps.append((f"cell {number}: {head}", _UNKNOWN))
            return [""] * len(lines)
        lines = [*lines[:first], "", *lines[first + 1 :]]
        return _python(number, lines, notebook)
    converted = [_line(number, each, notebook) for each in lines]
    changed = {place for place, (old, new) in enumerate(zip(lines, converted, strict=True), 1) if old != new}
    try:
        tree = ast.parse("\n".join(converted))
    except (SyntaxError, ValueError):
        return converted  # the script's own message names the line
    if changed - {each.lineno for each in ast.walk(tree) if isinstance(each, ast.stmt)}:
        notebook.gaps.append(
            (f"cell {number}", "a text in it has lines that look like commands: put it in its own cell")
        )
    return converted


def _line(number: int, line: str, notebook: Notebook) -> str:
    """Return one line of a cell as Python; a statement that does nothing for one that is left out."""
    indent = line[: len(line) - len(line.lstrip())]
    if _HELP.match(line):
        return f"{indent}pass"
    if (parts := _RUN.match(line)) is None:
        if re.match(r"^\s*[\w.,\s]+=\s*[!%]", line):
            notebook.gaps.append((f"cell {number}: {line.strip()}", _UNKNOWN))
            return f"{indent}pass"
        return line
    kind, rest = parts[2].strip(), parts[3].strip()
    if kind == "%time":
        return f"{indent}{rest}"
    if kind in ("%env", "%set_env"):
        pair = _VARIABLE.match(rest)
        return f"{indent}import os; os.environ[{pair[1]!r}] = {pair[2]!r}" if pair else f"{indent}pass"
    words = rest.split()
    name = words[0] if words else ""
    place = f"cell {number}: {line.strip()}"
    chained = kind == "!" and any(each in rest for each in (";", "&", "|", ">", "`", "$("))
    if kind != "?" and (chained or name not in NAMES["notebook_lines" if kind == "%" else "notebook_commands"]):
        notebook.gaps.append((place, _UNKNOWN))
    elif kind == "!" and name in NAMES["notebook_fetches"]:
        notebook.dropped.append((place, _BEFORE))
    return f"{indent}pass"
