"""No key of the run file is ignored in silence: `benchmarks/silent_keys.py` tried all keys and tasks, and every pair
without effect has its reason in `support.silent_keys.IDLE`."""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from lockstep.config import plugins
from support.command import ended, start_anew
from support.places import ROOT
from support.silent_keys import IDLE, KINDS, TASKS_OF, keys_of

SCRIPT = ROOT / "benchmarks/silent_keys.py"
AGAIN = "run benchmarks/silent_keys.py of them, and keep what it prints beside the other records"


@cache
def recorded() -> dict[tuple[str, str], str]:
    """Return (kind, key) -> result of a change, from the newest record that has it."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted((ROOT / "benchmarks/results").glob("*-silent-keys.jsonl")):
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            found |= {(line["kind"], key): outcome for key, outcome in line["keys"].items()}
    return found


def idle(kind: str, key: str) -> list[tuple[str, str]]:
    return [of for of in IDLE if fnmatchcase(kind, of[0]) and fnmatchcase(key, of[1])]


def test_every_task_has_a_kind() -> None:
    assert {*plugins.names("tasks")} == {*TASKS_OF.values()}


def test_every_key_was_tried_with_every_kind_of_task() -> None:
    missing = [(kind, key) for kind in KINDS for key in keys_of(kind) if (kind, key) not in recorded()]
    assert not missing, AGAIN
    assert len(recorded()) > 1500


def test_every_run_ended_or_was_refused_with_a_code() -> None:
    outcomes = {(kind, key): recorded()[kind, key] for kind in KINDS for key in keys_of(kind)}
    assert not {pair: outcome for pair, outcome in outcomes.items() if outcome.startswith("status")}
    assert not {pair: outcome for pair, outcome in outcomes.items() if outcome == "refused "}


def test_pairs_without_effect_and_reasons_match() -> None:
    silent = {pair for pair, outcome in recorded().items() if outcome == "nothing" and pair[1] in keys_of(pair[0])}
    assert not [pair for pair in silent if not idle(*pair)]
    assert {of for pair in silent for of in idle(*pair)} == {*IDLE}


@pytest.mark.processes
@pytest.mark.slow
def test_the_record_is_current(tmp_path: Path) -> None:
    """The record is current for the keys of one task; the control is a key without visible effect."""
    kind = "language_modeling prompts"
    command = [sys.executable, str(SCRIPT), "--kinds", kind, "--keys", r"^task\.|^max_time$"]
    status, out, err = ended(start_anew(command, tmp_path, tmp_path / "cache", HF_HUB_OFFLINE="1"))
    assert status == 0, err
    found = json.loads(out.splitlines()[-1])["keys"]
    assert found["max_time"] == "nothing"
    assert found == {key: outcome for (of, key), outcome in recorded().items() if of == kind and key in found}
