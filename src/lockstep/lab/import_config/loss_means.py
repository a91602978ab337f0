"""Note where a script's loss is another mean than lockstep's, which is the mean over the targets of a step.

In: a script and its draft, once the model and the data are known. Out: notes on micro-batches that
count equally whatever their number of targets, on gradients that Trainer adds without dividing, on a divisor that
counts tokens that are never predicted, and on texts that end differently.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers

from lockstep.lab.import_config.model_defaults import empty_model
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft

_PER_TOKEN = ("language_modeling", "masked_language_modeling", "translation", "summarization", "token_classification")


def note_loop(draft: RunDraft) -> None:
    """Note means of means in a loop that divides the loss of each micro-batch by their number."""
    count = int(draft.keys.get("micro_batches", 1))
    if draft.task in _PER_TOKEN and count > 1:
        draft.notes.append(
            f"difference: the original averages the mean losses of its {count} micro-batches; lockstep weights all "
            "targets of a step equally, so a micro-batch with more targets counts more"
        )


def note_trainer(draft: RunDraft, script: Script) -> None:
    """Note if the installed Trainer divides the loss by something else than the number of targets."""
    plain = draft.task == "language_modeling" and not draft.keys.keys() & {"task.prompt", "task.messages"}
    if plain and draft.keys.get("task.packing") is False and any(c.name == "SFTTrainer" for c in script.calls):
        note_cut(draft)
    model = empty_model(draft, script)
    if model is None:
        return
    forward: Any = inspect.unwrap(type(model).forward)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(forward).parameters.values())
    if not getattr(model, "accepts_loss_kwargs", takes_any):
        return
    name, version = type(model).__name__, transformers.__version__
    uses, count = "self.loss_function(" in inspect.getsource(forward), int(draft.keys.get("micro_batches", 1))
    smoothed = any(draft.keys.get(f"{section}.label_smoothing") for section in ("task", "optim"))
    counted = draft.task != "question_answering"  # Trainer counts the targets of `labels`; positions are none
    if not uses and count > 1 and counted and not smoothed:
        draft.notes.append(
            f"difference: Trainer of transformers {version} adds up the gradients of the {count} micro-batches of "
            f"{name}, whose forward() ignores num_items_in_batch; lockstep averages them over all targets. With "
            f"optim.name=sgd multiply optim.learning_rate by {count}; adamw differs only through eps and clipping"
        )
    if uses and plain and not _shifts(model):
        draft.notes.append(
            f"difference: Trainer of transformers {version} divides the loss of {name} by all tokens of a row, "
            "including the first, which is never predicted; lockstep divides by the predicted tokens, so losses and "
            "gradients are larger by about 1 / (tokens of a row)"
        )


def note_cut(draft: RunDraft, length: str = "task.block_size") -> None:
    """Note that a longer text is several examples here, where the original trains on its first tokens alone."""
    draft.notes.append(
        f"difference: the original truncates texts longer than {length} and drops the rest; lockstep trains on the "
        "rest as further examples, so an epoch has more steps (data.filter with max_tokens drops long texts)"
    )


def _shifts(model: Any) -> bool:
    """Return whether Trainer leaves the first token of each row out of its count."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss  # type: ignore[arg-type]


def note_end(draft: RunDraft, where: str, truncates: bool) -> None:
    """Note that lockstep splits and ends texts differently than the script. `where`: the line that tokenizes them, and
    whether it truncates."""
    if draft.keys.get("task.packing") is not False:
        return
    if draft.task == "masked_language_modeling" and truncates:
        note_cut(draft, "data.max_length")
    if draft.task != "language_modeling":
        return
    if draft.keys.keys() & {"task.prompt", "task.messages"}:
        return
    if truncates:
        note_cut(draft)
    source = draft.keys.get("tokenizer.source") or draft.keys.get("model.source")
    ends = f"the tokenizer's end token, which is learned; a text of {where} has it only if the tokenizer writes it"
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source)
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if end is None or tokenizer("a")["input_ids"][-1:] == [end]:
            return
        ends = f"{tokenizer.convert_ids_to_tokens(end)}, which is learned; a text of {where} ends without it"
    except Exception:  # planning says why
        pass
    draft.notes.append(f"difference: a text ends with {ends}")


def note_length(draft: RunDraft, where: str) -> None:
    """Check the length of a script that takes the smaller of it and the tokenizer's own. Adds a gap if the tokenizer's
    is smaller, or a note if the tokenizer is not here. `where`: the line that cuts texts, or makes blocks."""
    source = draft.keys.get("tokenizer.source") or draft.keys.get("model.source")
    keys = ("task.block_size", "data.max_length", "task.target_length")
    key = next((key for key in keys if key in draft.keys), None)
    if key is None or draft.is_given(key):
        return
    length, what = draft.keys[key], "blocks" if draft.keys.get("task.packing") else "texts"
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source)
    except Exception:
        why = f"at {where}, {what} are no longer than the tokenizer's model_max_length"
        draft.notes.append(f"{key} is {length}; {why}: compare it")
        return
    if tokenizer.model_max_length < length:
        why = f"{what} have the tokenizer's model_max_length, {tokenizer.model_max_length}, which is less"
        draft.lacks(f"{where}: {key} {length}", why, key)


def note_positions(draft: RunDraft, where: str) -> None:
    """Note that the script's softmax over answer positions includes padding. `where`: the line that pads."""
    draft.notes.append(
        f"difference: the original pads windows ({where}), and its softmax over answer positions includes padding; "
        "lockstep's does not, so its losses are smaller"
    )
