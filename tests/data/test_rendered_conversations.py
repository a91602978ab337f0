"""The loader's tokens of a conversation are those of the tokenizer's own `apply_chat_template`, and no others."""

from __future__ import annotations

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.data.conversations import Writing, documents_of

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
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
