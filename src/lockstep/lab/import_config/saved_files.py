"""Folders and files into which a script saves its model: a run writes its own.

In: a `Script`. Out: a gap for each call that saves, which does not affect training.
"""

from __future__ import annotations

from lockstep.lab.import_config.kinds import kind_of
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft

_SAVING = ("save_pretrained", "save_model", "save_state")


def note(script: Script, draft: RunDraft) -> None:
    """Name the calls that save the model, except a tokenizer's; a line that is named already is not named again."""
    for call in script.calls:
        saves = call.name in _SAVING or call.origin == "torch.save"
        if not saves or kind_of(script, call.receiver) in ("tokenizer", "config"):
            continue
        if not any(gap.name.startswith(f"line {call.line}:") for gap in draft.gaps):
            why = "a run writes its checkpoints and its model, OUTPUT/export, into the folder that output names"
            draft.drop(str(call), None, why, by=("output",))
