"""Other names of keys: those of other systems, and those that have no counterpart here.

In: `foreign_keys/`, a YAML file of the keys of each system, which `lockstep init --from` reads, too. Out: messages
about unknown keys, which look there before they guess; docs/reference/coming-from shows the tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CLOSE = 0.75  # how alike a name must be to one of ours to be guessed
MOST = 4  # places named for one name
TABLES = Path(__file__).parent / "foreign_keys"


@cache
def foreign_keys(system: str) -> dict[str, dict[str, Any]]:
    """The rows of a file in `foreign_keys/`, by the names of keys in that system."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    rows = yaml.load((TABLES / f"{system}.yaml").read_text(encoding="utf-8"), Loader=loader)
    return {name: {"to": row} if isinstance(row, str) else row for name, row in rows.items()}


def foreign_names() -> dict[str, tuple[str, str]]:
    """A key's last part as it is written elsewhere -> our key ("" where nothing has to be set), and one sentence on
    what is different."""
    return {name: (row.get("to", ""), row["how"]) for name, row in foreign_keys("names").items()}


def without_counterpart() -> dict[str, str]:
    """A field of TrainingArguments -> why nothing is to be set."""
    known = foreign_keys("names")
    return {name: row["none"] for name, row in foreign_keys("trainer").items() if "none" in row and name not in known}


def place(key: str, ours: Mapping[str, str]) -> str | None:
    """What an unknown key is here, by the exact name of its last part: a foreign name, or a key of ours that stands
    elsewhere. `ours`: every dotted key -> when it is one ("" for always). None: nobody knows the name."""
    name = key.rpartition(".")[2].replace("-", "_").lower()
    if row := foreign_names().get(name):
        our_key, difference = row
        return f"it is {our_key!r} here: {difference}" if our_key else difference
    same = [f"{mine!r} {when or 'here'}" for mine, when in ours.items() if mine.rpartition(".")[2] == name]
    if not same and (reason := without_counterpart().get(name)):
        return f"it has no counterpart here: {reason}"
    return f"it is {' or '.join(same[:MOST])}{' or another' if len(same) > MOST else ''}" if same else None


def near(key: str, value: Any, siblings: Sequence[str], ours: Mapping[str, str]) -> str:
    """Explain an unknown key, by its exact name or by a guess: a key beside it, the names inside it if it is a
    mapping, a key elsewhere; else the keys that are known there."""
    if (home := place(key, ours)) is not None:
        return home
    last = key.rpartition(".")[2]
    if close := difflib.get_close_matches(last, siblings, 1, cutoff=CLOSE):
        return f"did you mean {close[0]!r}?"
    if isinstance(value, Mapping):
        inner = [f"{name!r}: {home}" for name in map(str, value) if (home := place(name, ours)) is not None]
        if inner:
            return f"there is no such section; of what stands in it, {'; '.join(inner)}"
    places = {mine.rpartition(".")[2]: mine for mine in reversed(list(ours))}  # of equal ones the first
    if close := difflib.get_close_matches(last, list(places), 1, cutoff=CLOSE):
        return f"did you mean {places[close[0]]!r}?"
    return f"known here: {', '.join(siblings)}"
