#!/usr/bin/env bash
# tokenizers 0.23.3: `WordPieceTrainer` (and so transformers' `train_new_from_iterator` of a BERT tokenizer), and `BpeTrainer`
# with `continuing_subword_prefix`, give another tokenizer each time they learn from the same texts: the letters that continue a
# word are numbered in the order of a hash table with random keys. Nearly every text gets other ids; and since those numbers
# decide between pairs that are equally frequent, other merges are learned, so that texts are split otherwise too. Ranks that
# each train a tokenizer, or a run that trains it again before it resumes, feed one model different vocabularies.
# Plain `BpeTrainer` and `WordLevelTrainer` give the same one each time, and no trainer takes a seed.
# Reported in https://github.com/huggingface/tokenizers/issues/1794.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q tokenizers==0.23.3
cd "$room"
cat > shown.py <<'PYTHON'
import random

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

draw = random.Random(0)
words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(400)]
texts = [" ".join(draw.choices(words, k=20)) for _ in range(400)]
options = {"vocab_size": 300, "special_tokens": ["[UNK]"], "show_progress": False}
prefix = {"continuing_subword_prefix": "##"}
kinds = {
    "WordPiece": lambda: (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(**options)),
    "BPE with a prefix": lambda: (models.BPE(unk_token="[UNK]", **prefix), trainers.BpeTrainer(**options, **prefix)),
    "BPE": lambda: (models.BPE(unk_token="[UNK]"), trainers.BpeTrainer(**options)),
    "WordLevel": lambda: (models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer(**options)),
}


def learned(kind: str) -> Tokenizer:
    model, trainer = kinds[kind]()
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


for kind in kinds:
    first, *others = (learned(kind) for _ in range(12))
    before = first.encode_batch(texts)
    ids, pieces = [], []
    for other in others:
        after = other.encode_batch(texts)
        ids.append(sum(a.ids != b.ids for a, b in zip(before, after)))
        pieces.append(sum(a.tokens != b.tokens for a, b in zip(before, after)))
    print(f"{kind}: of {len(texts)} texts, beside the first tokenizer: other ids {ids}, other pieces {pieces}")
    if kind in ("BPE", "WordLevel"):
        assert max(ids) == 0
    else:
        assert sum(ids) > len(texts) * len(others) / 2
    if kind == "BPE with a prefix":
        assert max(pieces) > 0
PYTHON
environment/bin/python shown.py
