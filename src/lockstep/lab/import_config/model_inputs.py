"""The inputs that a loop passes to a transformers model, and the loss that it computes from the outputs.

In: calls of the model and of a loss. Out: a gap for each input that lockstep passes and the script leaves out; whether
a loss is the one that the model would compute; what replaces batches that are cut from a file of token ids.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from lockstep.lab.import_config import loading
from lockstep.lab.import_config.script import Script, code_of
from lockstep.lab.import_config.table import NAMES, RunDraft


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


def is_cross_entropy(script: Script, function: ast.expr) -> bool:
    """Return whether a function is the mean cross entropy without weights or smoothing."""
    origin = script.origin_of(function)
    if origin in ("torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss()"):
        return True
    value = script.bound(function, last=True) if isinstance(function, ast.Name) else function
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("to", "cuda"):
        value = value.func.value
    plain = isinstance(value, ast.Call) and not value.args and not value.keywords
    return plain and isinstance(value, ast.Call) and script.origin_of(value.func) == "torch.nn.CrossEntropyLoss"


def learns_logits(script: Script) -> bool:
    """Return whether a script's only loss is the cross entropy of a classifier of several classes."""
    losses = [c for c in script.calls if c.name in NAMES["losses"] or c.name.endswith("Loss")]
    loaded = [c for c in script.calls if c.name == "from_pretrained" and "ForSequenceClassification" in c.origin]
    others = [word.arg for c in loaded for word in c.node.keywords if word.arg in (None, "problem_type", "config")]
    alone = [script.known(w.value) for c in loaded for w in c.node.keywords if w.arg == "num_labels"]
    if len(losses) != 1 or not loaded or others or not alone or any(not isinstance(n, int) or n < 2 for n in alone):
        return False
    call = losses[0]
    if call.name == "cross_entropy":
        return len(call.node.args) == 2 and not call.node.keywords and is_cross_entropy(script, call.node.func)
    return call.origin == "torch.nn.CrossEntropyLoss" and not call.node.args and not call.node.keywords


def windows_of_ids(script: Script) -> str | None:
    """Explain, for a script whose batches are windows at random positions of a file of token ids (nanoGPT's way), what
    replaces them in a run; None for any other script."""
    names = {call.name for call in script.calls}
    if not ({"memmap", "fromfile"} & names and {"randint", "randperm"} & names):
        return None
    length = next((v for (_, n), of in script.bindings.items() if n == "block_size" for v in of if v), None)
    block = script.known(length)
    size = f"task.block_size={block}" if isinstance(block, int) else "task.block_size"
    return (
        "its batches are windows at random places of a file of token ids, and no epoch; a run has each text once an "
        f"epoch: give the texts with --data, task.packing=true, {size}, and the schedule as optim.schedule, "
        "optim.warmup_steps and optim.min_lr_ratio; --partial writes the other keys"
    )
