"""Keys of other systems and their counterparts here, used to explain unknown keys.

In: `foreign_keys/`, one YAML file per system, which `lockstep init --from` reads, too. Out: messages about unknown
keys: an exact match in these tables, else the closest name. docs/reference/coming-from shows the tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CLOSE = 0.75  # minimum similarity (difflib ratio) of a suggested key
MOST = 4  # keys listed for one name
TABLES = Path(__file__).parent / "foreign_keys"
# Suffix of a file that people give in place of a run file -> the option of `lockstep init` that reads it.
INIT_READS = dict.fromkeys((".csv", ".tsv", ".jsonl", ".parquet", ".txt"), "--data")
INIT_READS |= dict.fromkeys((".py", ".sh"), "--from")


@cache
def foreign_keys(system: str) -> dict[str, dict[str, Any]]:
    """Return the rows of `foreign_keys/SYSTEM.yaml`, by that system's key."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    rows = yaml.load((TABLES / f"{system}.yaml").read_text(encoding="utf-8"), Loader=loader)
    return {name: {"to": row} if isinstance(row, str) else row for name, row in rows.items()}


def foreign_names() -> dict[str, tuple[str, str]]:
    """Return foreign name (last part of a key) -> (our key, or "" if nothing has to be set; a sentence on the
    difference)."""
    return {name: (row.get("to", ""), row["how"]) for name, row in foreign_keys("names").items()}


def without_counterpart() -> dict[str, str]:
    """Return field of TrainingArguments -> why it has no counterpart."""
    known = foreign_keys("names")
    return {name: row["none"] for name, row in foreign_keys("trainer").items() if "none" in row and name not in known}


def place(key: str, ours: Mapping[str, str]) -> str | None:
    """Explain an unknown key by the exact name of its last part: a foreign name, or our key in another section.

    `ours`: every dotted key -> the plug-ins that have it ("": always valid). Returns None for an unknown name."""
    section, dot, name = key.rpartition(".")
    name = name.replace("-", "_").lower()
    deeper = [f"{mine!r}" for mine in ours if dot and mine.startswith(f"{section}.") and mine.endswith(f".{name}")]
    if len(deeper) == 1 and key not in ours:  # a level is missing: `track.mode` for `track.wandb.mode`
        return f"it is {deeper[0]}"
    if row := foreign_names().get(name):
        our_key, difference = row
        return f"it is {our_key!r} here: {difference}" if our_key else difference
    if (when := ours.get(key)) is not None:  # of another plug-in than the run's
        return f"it is a key of runs {when}" if when else None
    same = [f"{mine!r} {when or 'here'}" for mine, when in ours.items() if mine.rpartition(".")[2] == name]
    if not same and (reason := without_counterpart().get(name)):
        return f"it has no counterpart here: {reason}"
    if not same:
        return None
    return f"it is {' or '.join([*same[:MOST], *(['another'] if len(same) > MOST else [])])}"


def near(key: str, value: Any, siblings: Sequence[str], ours: Mapping[str, str]) -> str:
    """Explain an unknown key: by its exact name, by the closest sibling, by the names inside it if it is a mapping, or
    by the closest key elsewhere that the run may have. Otherwise list the siblings."""
    if (home := place(key, ours)) is not None:
        return home
    last = key.rpartition(".")[2]
    if close := difflib.get_close_matches(last, siblings, 1, cutoff=CLOSE):
        return f"did you mean {close[0]!r}?"
    if isinstance(value, Mapping):
        inner = [f"{name!r}: {home}" for name in map(str, value) if (home := place(name, ours)) is not None]
        if inner:
            return f"there is no such section; about its keys: {'; '.join(inner)}"
    valid = [mine for mine, when in ours.items() if not when]  # not keys of other plug-ins than the run's
    places = {mine.rpartition(".")[2]: mine for mine in reversed(valid)}  # the first of equal names
    if close := difflib.get_close_matches(last, list(places), 1, cutoff=CLOSE):
        return f"did you mean {places[close[0]]!r}?"
    section = key.rpartition(".")[0]
    keys = f"keys of {section} are" if section else "keys are"
    if section and "options" in siblings:  # a mapping that an engine reads
        plain = ", ".join(name for name in siblings if name != "options")
        return f"{keys} {plain}; an option of the engine would be '{section}.options.{last}'"
    return f"{keys} {', '.join(siblings)}"


def close_file(path: Path, files: Iterable[Path]) -> Path | None:
    """Return the file whose name without its ending is closest to that of a missing `path`, or None."""
    stems = {file.stem: file for file in files}
    cutoff = 0.66 if 3 <= len(path.stem) <= 4 else CLOSE  # one letter of a short name is a quarter of it or more
    close = difflib.get_close_matches(path.stem, list(stems), 1, cutoff=cutoff)
    return path.with_name(stems[close[0]].name) if close else None
