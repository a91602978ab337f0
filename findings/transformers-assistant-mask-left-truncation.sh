#!/usr/bin/env bash
# transformers 5.23.0: apply_chat_template(return_assistant_tokens_mask=True, truncation=True) of a tokenizer that
# truncates on the left, which keeps the end of a conversation.
# Seen: where an earlier answer is cut off, the ids of the last answer are there and the mask is 0 everywhere: the longest
# conversations teach nothing. Where only the question is cut, and truncated on the right, the mask is right.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0 jinja2==3.1.6
cd "$room"
cat > shown.py <<'PYTHON'
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = "[PAD] [UNK] user assistant is it late yes very".split()
fast = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
fast.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]")
tokenizer.chat_template = (
    "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %} {% endfor %}"
)
talk = [
    {"role": "user", "content": "late"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "very"},
    {"role": "assistant", "content": "very late"},
]


def rendered(side: str, **options: object) -> tuple[list[str], list[int]]:
    tokenizer.truncation_side = side
    made = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True, **options)
    return tokenizer.convert_ids_to_tokens(made["input_ids"]), made["assistant_masks"]


whole, mask = rendered("right")
print("whole   ", *zip(whole, mask))
assert mask == [0, 0, 0, 1, 0, 0, 0, 1, 1]
assert rendered("right", truncation=True, max_length=8) == (whole[:8], mask[:8])
assert rendered("left", truncation=True, max_length=8) == (whole[1:], mask[1:])
shorter = rendered("left", truncation=True, max_length=4)
print("its last", *zip(*shorter))
assert shorter == (whole[5:], [0, 0, 0, 0])
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
