"""Other names of keys: those of other systems, those that have no counterpart here, and former ones of our own.

In: `foreign_keys/`, a YAML file of the keys of each system, which `lockstep init --from` reads, too. Out: messages
about unknown keys, which look there before they guess; docs/reference/coming-from shows the tables. A former name of
our own is read for one release, with a note.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.errors import InvalidValue

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


class RenamedKey(FutureWarning):
    """A run file uses the former name of a key, or of a value. `lockstep` prints it as a note."""


# Former dotted key -> present one. Keys of plug-ins stand here, too: no two of them use one name differently.
RENAMED = {
    "mirror": "remote_dir",
    "stop_after": "max_time",
    "guard": "sdc_check",
    "data.overlap": "data.decontaminate",
    "optim.clip": "optim.max_grad_norm",
    "optim.minimum": "optim.min_lr_ratio",
    "optim.layer_decay": "optim.layerwise_lr_decay",
    "optim.least": "optim.min_8bit_size",
    "optim.matrices": "optim.muon_params",
    "optim.adjust": "optim.lr_adjust",
    "strategy.exchange": "strategy.all_reduce",
    "launch.on_loss": "launch.on_rank_failure",
    "launch.copy_every": "launch.replicate_every",
    "launch.hang_s": "launch.hang_timeout_s",
    "launch.hand_over": "launch.rebalance_every",
    "launch.join_s": "launch.join_timeout_s",
    "launch.more_s": "launch.last_call_timeout_s",
    "launch.lost_s": "launch.keep_alive_timeout_s",
    "launch.warn": "launch.signal_before",
    "launch.claim": "launch.pvc",
    "launch.master": "launch.init_method",
    "track.wait_s": "track.close_timeout_s",
    "task.masked": "task.mlm_probability",
    "task.whole_words": "task.whole_word_mask",
    "task.cross_documents": "task.attend_across_documents",
    "task.scale": "task.similarity_scale",
}
# Present dotted key -> former value -> present one.
VALUES: dict[str, dict[Any, Any]] = {
    "data.decontaminate": {"warn": False, "drop": True},
    "strategy.all_reduce": {"tree": "hierarchical"},
    "sdc_check.on_difference": {"exclude": "evict"},
    "task.turns": {"each": "per_turn"},
}


def translate(section: str, values: Any, known: Mapping[str, Any]) -> Any:
    """The keys and values of a section ("" for the top of the file) under their present names, with a `RenamedKey`
    warning for each that had another. A key that `known` has keeps its name.

    Errors: `ValueError` where a key stands there under both names.
    """
    if not isinstance(values, Mapping):
        return values
    prefix = f"{section}." if section else ""
    present: dict[str, Any] = {}
    for key, value in values.items():
        name = RENAMED.get(f"{prefix}{key}", f"{prefix}{key}").removeprefix(prefix)
        if name != key and (key in known or name not in known):
            name = key  # a plug-in of the user's own may have a key of that name
        if name != key:
            if name in values:
                raise InvalidValue(
                    "LS1050",
                    f"{prefix}{key} is the former name of {prefix}{name}, and both are set; remove {prefix}{key}",
                )
            _note(f"{prefix}{key} is called {prefix}{name} now; the former name is read for one release")
        present[name] = _present_value(f"{prefix}{name}", value) if name in known else value
    return present


def _present_value(key: str, value: Any) -> Any:
    former = VALUES.get(key, {})
    if not isinstance(value, str) or value not in former:
        return value
    now = former[value]
    _note(f"{key}: {value} is written {str(now).lower() if isinstance(now, bool) else now} now")
    return now


def _note(text: str) -> None:
    warnings.warn(text, RenamedKey, stacklevel=2)


def of_checkpoint(arithmetic: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys as a checkpoint of any release has them, under their present names and values."""
    renamed = {RENAMED.get(key, key): value for key, value in arithmetic.items()}
    return {
        key: VALUES[key].get(value, value) if key in VALUES and isinstance(value, str) else value
        for key, value in renamed.items()
    }


def former(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a section under the names that they had first: what names of files in the cache are made of."""
    names = {now: then for then, now in RENAMED.items()}
    prefix = f"{section}."
    result = {}
    for key, value in values.items():
        then = {now: was for was, now in VALUES.get(f"{prefix}{key}", {}).items()}
        name = names.get(f"{prefix}{key}", f"{prefix}{key}").removeprefix(prefix)
        result[name] = then.get(value, value) if isinstance(value, str | bool) else value
    return result
