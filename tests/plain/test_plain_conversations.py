"""Conversations of the plain reference: the chat template's own tokens, and targets compared with transformers'
marks."""

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.plain.examples import IGNORED, encode_rows

TURN = "'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'"
CHATML = (
    "{% for m in messages %}{{ " + TURN + " }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TALK = [("user", "one?"), ("assistant", "two"), ("user", "three?"), ("assistant", "four")]


@pytest.fixture(scope="module")
def tok() -> Any:
    """A byte-level tokenizer with ChatML's marks; the end of a turn is the end token."""
    vocabulary = {letter: code for code, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=bytes_, **special)


def examples(tok: Any, template: str, row: dict[str, Any], **keys: Any) -> list[dict[str, Any]]:
    task = {
        "name": "language_modeling",
        "messages": "messages",
        "tools": None,
        "template_arguments": {},
        "chat_template": template,
        "turns": "together",
        "prompt": None,
        "packing": False,
        "block_size": 500,
    } | keys
    job = SimpleNamespace(run={"task": task, "data": {"max_length": 500}}, tokenizer=tok)
    return encode_rows(job, [row])


def conversation(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def learned(tok: Any, example: dict[str, Any]) -> str:
    return tok.decode([token for token in example["next"] if token != IGNORED])


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
def test_tokens_are_those_that_the_template_writes(tok: Any, template: str, end: str) -> None:
    """No end token is added to the template's tokens, whether or not the text ends in one."""
    messages = conversation(TALK)
    (example,) = examples(tok, template, {"messages": messages})
    whole = tok.apply_chat_template(messages, chat_template=template, return_dict=False)
    assert example["input_ids"] == whole[:-1]  # the last token is only a target
    assert [t for t in example["next"] if t != IGNORED] == tok(f"two{end}four{end}").input_ids


@pytest.mark.parametrize("turns", [TALK, TALK[:2], [("system", "be short"), *TALK], [*TALK, ("user", "five?")]])
def test_marked_targets_are_transformers_own(tok: Any, turns: list[tuple[str, str]]) -> None:
    messages = conversation(turns)
    encoded = tok.apply_chat_template(
        messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    masked = [
        token if mark else IGNORED for token, mark in zip(encoded.input_ids, encoded.assistant_masks, strict=True)
    ]
    (example,) = examples(tok, MARKED, {"messages": messages})
    assert example["next"] == masked[1:]


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
def test_per_turn_examples_train_their_own_turn(tok: Any, template: str, end: str) -> None:
    some = examples(tok, template, {"messages": conversation(TALK)}, turns="per_turn")
    assert [learned(tok, example) for example in some] == [f"two{end}", f"four{end}"]


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
@pytest.mark.parametrize("name", ["preference", "reward"])
def test_pairs_train_the_last_turn(tok: Any, name: str, template: str, end: str) -> None:
    """The answer is everything that the template writes after the prompt, or the part that it marks there."""
    keys = {"name": name, "prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "conversations": True}
    row = {"prompt": conversation(TALK[:3]), "chosen": conversation(TALK[3:]), "rejected": "no"}
    (pair,) = examples(tok, template, row, **keys)
    assert [learned(tok, answer) for answer in pair["answers"]] == [f"four{end}", f"no{end}"]
    for answer, last in zip(pair["answers"], ("four", "no"), strict=True):
        messages = conversation([*TALK[:3], ("assistant", last)])
        assert answer["input_ids"] == tok.apply_chat_template(messages, chat_template=template, return_dict=False)
