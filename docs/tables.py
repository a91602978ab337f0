"""Tables of other systems' keys, in place of the lines `<!-- table: SYSTEM -->` of pages.

In: `src/lockstep/config/foreign_keys/SYSTEM.yaml`, which `lockstep init --from` and messages about unknown keys read,
too. Out: `fill()`, a page's text with its tables; docs/site.py calls it. Needs PyYAML and nothing from lockstep.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

SOURCES = Path(__file__).resolve().parents[1] / "src/lockstep/config/foreign_keys"
MARK = re.compile(r"^<!-- table: (\w+) -->$", re.M)


def fill(text: str) -> str:
    """Replace each mark by its table."""
    return MARK.sub(lambda mark: table(mark[1]), text)


def table(system: str) -> str:
    """The keys that have a counterpart, then those that have none."""
    rows = yaml.safe_load((SOURCES / f"{system}.yaml").read_text(encoding="utf-8"))
    there = {name: {"to": row} if isinstance(row, str) else row for name, row in rows.items()}
    lines = ["| theirs | here | how |", "|---|---|---|"]
    for name, row in there.items():
        if "none" not in row:
            here = f"`{row['to']}`" if row.get("to") else "nothing to set"
            lines.append(f"| {_names(name, row)} | {here} | {_cell(row.get('how', ''))} |")
    missing = {_names(name, row): row["none"] for name, row in there.items() if "none" in row}
    if missing:
        lines += ["", "No counterpart; `init --from` lists those that are set:", "", "| theirs | why |", "|---|---|"]
        lines += [f"| {names} | {_cell(why)} |" for names, why in missing.items()]
    return "\n".join(lines)


def _names(name: str, row: dict[str, Any]) -> str:
    return ", ".join(f"`{each}`" for each in (name, *row.get("newer", ())))


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|")
