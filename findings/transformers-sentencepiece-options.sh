#!/usr/bin/env bash
# transformers 5.23.0, sentencepiece 0.2.3: a SentencePiece model says how its text is normalized, and transformers reads
# little of it. T5Tokenizer removes double spaces that a model with remove_extra_whitespaces=False keeps, and adds the space
# in front that one with add_dummy_prefix=False leaves out; DebertaV2Tokenizer does not fold the case that a model of the rule
# nmt_nfkc_cf folds. So the model is fed other tokens than those it was trained on, or the user wants. No warning.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q transformers==5.23.0 sentencepiece==0.2.3 protobuf==7.36.2 tokenizers==0.23.3
cd "$room"
cat > shown.py <<'PYTHON'
import io
from pathlib import Path

import sentencepiece
from transformers import DebertaV2Tokenizer, T5Tokenizer

texts = ["the cat sat on the mat and the dog ran Fast", "A quick brown fox jumps over the lazy dog"] * 20
special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
cases = (
    ("usual", T5Tokenizer, {}, "the  cat", True),
    ("keeps spaces", T5Tokenizer, {"remove_extra_whitespaces": False}, "the  cat", False),
    ("no space in front", T5Tokenizer, {"add_dummy_prefix": False}, "the cat", False),
    ("folds case", T5Tokenizer, {"normalization_rule_name": "nmt_nfkc_cf"}, "THE Cat", True),
    ("folds case", DebertaV2Tokenizer, {"normalization_rule_name": "nmt_nfkc_cf"}, "THE Cat", False),
)
for name, kind, options, text, alike in cases:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, vocab_size=50, hard_vocab_limit=False, minloglevel=2,
        **special, **options,
    )
    folder = Path(f"{name} {kind.__name__}".replace(" ", "-"))
    folder.mkdir()
    (folder / kind.vocab_files_names["vocab_file"]).write_bytes(written.getvalue())
    own = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue()).encode(text, out_type=str)
    seen = kind.from_pretrained(str(folder)).tokenize(text)
    print(f"{kind.__name__} {name}: {text!r} sentencepiece {own} transformers {seen}")
    assert (own == seen) == alike
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
