#!/usr/bin/env bash
# tokenizers 0.23.3: truncation to fewer tokens than the template adds (two for one text, three for a pair).
# Seen: to 2 tokens a text becomes [CLS] [SEP]; to 1 token, or 0, it is not truncated at all: 20 words give 22 tokens. A pair
# is not truncated to 2. No error, no warning; without special tokens the limits 1 and 0 hold.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q tokenizers==0.23.3
cd "$room"
cat > shown.py <<'PYTHON'
from tokenizers import Tokenizer, models, pre_tokenizers, processors

tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2, "[CLS]": 3, "[SEP]": 4}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 3), ("[SEP]", 4)]
)
text, lengths = "a b " * 10, {}
for limit in (4, 3, 2, 1, 0):
    tokenizer.enable_truncation(limit)
    plain = tokenizer.encode(text, add_special_tokens=False)
    lengths[limit] = tuple(map(len, (tokenizer.encode(text), tokenizer.encode(text, "b"), plain)))
    print(f"at most {limit}: {lengths[limit][0]} tokens, of a pair {lengths[limit][1]}, without special ones {lengths[limit][2]}")
assert lengths == {4: (4, 4, 4), 3: (3, 3, 3), 2: (2, 24, 2), 1: (22, 24, 1), 0: (22, 24, 0)}
PYTHON
environment/bin/python shown.py
