"""The inputs that a loop passes to a transformers model by their names.

In: calls of the model. Out: a gap for each input that lockstep passes and the script leaves out.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from lockstep.lab.import_config import loading
from lockstep.lab.import_config.script import code_of
from lockstep.lab.import_config.table import RunDraft


@dataclass
class ModelInputs:
    """Named inputs that the loop passes to a transformers model."""

    named: tuple[ast.Call, frozenset[str]] | None = None  # a call without **batch, and its keyword arguments
    learned: ast.Call | None = None  # a call whose labels are its input_ids

    def check(self, draft: RunDraft) -> None:
        """After looking at the data, add a gap for each input that lockstep passes to the model and the script leaves
        out."""
        if draft.keys.get("task.packing"):  # packed blocks have no padding
            return
        if self.learned is not None:
            why = "the script learns padding, because labels are all of input_ids; lockstep does not"
            draft.lacks(f"line {self.learned.lineno}: {code_of(self.learned)}", why, "task.packing")
        if self.named is None:
            return
        node, names = self.named
        if "attention_mask" not in names:
            why = "the script does not pass attention_mask, so its model attends to padding; in lockstep it does not"
            draft.lacks(f"line {node.lineno}: {code_of(node)}", why)
        if "token_type_ids" not in names:
            loading.untyped(draft, f"line {node.lineno}: {code_of(node)}")
