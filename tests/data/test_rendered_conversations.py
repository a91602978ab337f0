"""The loader's tokens of a conversation are those of the tokenizer's own `apply_chat_template`, and no others."""

from __future__ import annotations

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.data.conversations import Writing, documents_of
from lockstep.tasks.answer_pairs import AnswerPairOptions, tokens_of
from support.messages import raises

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = CHATML.replace(
    "{{ m['content'] + '<|im_end|>' + '\n' }}",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}",
)
TALK = [
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "one three"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "<|im_start|>", "<|im_end|>", "\n", "user", "assistant", "one", "two", "three"]
    fast = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    fast.pre_tokenizer = pre_tokenizers.Sequence([fast.pre_tokenizer, pre_tokenizers.Split("\n", "isolated")])
    made = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = CHATML
    return made


@pytest.mark.parametrize("each", [False, True])
def test_a_conversation_ends_as_its_template_ends_it(tokenizer: PreTrainedTokenizerFast, each: bool) -> None:
    rows = Dataset.from_dict({"messages": [TALK]})
    (documents, count), *rest = documents_of(rows, tokenizer, Writing("messages", each=each), range(1))
    assert (rest, count) == ([], 1)
    rendered = [tokenizer.apply_chat_template(TALK[:n], return_dict=False) for n in ((2, 4) if each else (4,))]
    assert documents.ids.tolist() == [token for ids in rendered for token in ids]
    assert documents.lengths.tolist() == [len(ids) for ids in rendered]
    assert rendered[-1][-2:] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "\n"])  # not ended twice
    answers = [["three", "<|im_end|>", "\n"], ["one", "three", "<|im_end|>", "\n"]]
    learned = [token for token, scored in zip(documents.ids.tolist(), documents.scored.tolist(), strict=True) if scored]
    assert tokenizer.convert_ids_to_tokens(learned) == [token for answer in answers for token in answer]


@pytest.mark.parametrize("each", [False, True])
def test_what_a_template_marks_is_learned(tokenizer: PreTrainedTokenizerFast, each: bool) -> None:
    """The mask of transformers is the judge; of a turn by itself, the mask of the last turn."""
    rows = Dataset.from_dict({"messages": [TALK]})
    ((documents, _),) = documents_of(rows, tokenizer, Writing("messages", MARKED, each=each), range(1))
    asked = {"chat_template": MARKED, "return_dict": True, "return_assistant_tokens_mask": True}
    rendered = [tokenizer.apply_chat_template(TALK[:n], **asked) for n in ((2, 4) if each else (4,))]
    masks = [list(one["assistant_masks"]) for one in rendered]
    if each:
        first = sum(masks[0])
        masks[1] = [int(mark and place > masks[1].index(1) + first) for place, mark in enumerate(masks[1])]
    assert documents.ids.tolist() == [token for one in rendered for token in one["input_ids"]]
    assert documents.scored.tolist() == [bool(mark) for mask in masks for mark in mask]
    plain = documents_of(rows, tokenizer, Writing("messages", each=each), range(1))
    assert documents.scored.sum() == next(iter(plain))[0].scored.sum() - 2  # the control: newlines are learned there


def test_a_template_that_marks_nothing_of_a_turn_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    template = MARKED.replace("m['role'] == 'assistant'", "m['content'] == 'one three'")
    rows = Dataset.from_dict({"messages": [TALK]})
    (_, _), *_ = documents_of(rows, tokenizer, Writing("messages", template), range(1))  # one of two turns
    with raises("LS2400", "row 0", "message 1"):
        list(documents_of(rows, tokenizer, Writing("messages", template, each=True), range(1)))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_an_answer_of_a_pair_is_rendered_and_no_more(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    options = AnswerPairOptions(chosen="a", rejected="b", conversations=True, chat_template=template)
    ids, first = tokens_of(tokenizer, options, TALK[:3], TALK[3:])
    assert ids == tokenizer.apply_chat_template(TALK, chat_template=template, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids[first:]) == ["one", "three", "<|im_end|>", "\n"]
