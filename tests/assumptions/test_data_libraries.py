"""Assumptions about tokenizers, datasets and safetensors."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from support.assumed import rests_on_it

TEXTS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen jugs", "thequick foxbox over"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def words(vocabulary: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@rests_on_it("src/lockstep/data/tokenizer.py")
def test_wordpiece_repeats_if_its_first_pieces_are_in_order() -> None:
    """WordPiece training gives the same vocabulary each time if the one-character continuation pieces are passed first,
    in order."""

    def pre_tokenized() -> Tokenizer:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer

    short = pre_tokenized()
    short.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=1, show_progress=False))
    inner = sorted(piece for piece in short.get_vocab() if piece.startswith("##") and len(piece) == 3)
    assert len(inner) > 15
    trained = []
    for _ in range(8):
        tokenizer = pre_tokenized()
        special = [*SPECIAL, *inner]
        trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, show_progress=False)
        tokenizer.train_from_iterator(TEXTS, trainer)
        trained.append(tokenizer.get_vocab())
    assert all(each == trained[0] for each in trained)


@pytest.mark.processes
@rests_on_it("src/lockstep/data/tokenizer.py")
def test_wordpiece_and_unigram_training_differ_between_processes() -> None:
    """WordPiece and Unigram training give different vocabularies, ids or scores in different processes, so ranks must
    not each train a tokenizer. WordLevel training gives the same, also for words of equal count."""
    code = (
        "import hashlib, json\nfrom tokenizers import Tokenizer, models, pre_tokenizers, trainers\n"
        "made = Tokenizer(models.WordPiece(unk_token='[UNK]'))\n"
        "made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()\n"
        "trainer = trainers.WordPieceTrainer(vocab_size=90, show_progress=False)\n"
        f"made.train_from_iterator({TEXTS!r}, trainer)\n"
        "print(hashlib.sha256(json.dumps(made.get_vocab(), sort_keys=True).encode()).hexdigest())\n"
        "for kind in ('Unigram', 'WordLevel'):\n"
        "    made = Tokenizer(getattr(models, kind)())\n"
        "    made.pre_tokenizer = pre_tokenizers.Whitespace()\n"
        "    trainer = getattr(trainers, kind + 'Trainer')(vocab_size=60, unk_token='?', show_progress=False)\n"
        f"    made.train_from_iterator({TEXTS!r}, trainer)\n"
        "    print(hashlib.sha256(made.to_str().encode()).hexdigest())"
    ).replace("unk_token='?'", "special_tokens=['?']")
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(6)]
    word_piece, unigram, word_level = (set(seen) for seen in zip(*(run.split() for run in runs), strict=True))
    assert (len(word_piece) > 1, len(unigram) > 1, len(word_level)) == (True, True, 1)


@rests_on_it("src/lockstep/data/tokenizer.py")
def test_bpe_training_repeats() -> None:
    """BPE training with an initial alphabet gives the same vocabulary each time."""
    trained = []
    for _ in range(5):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=290, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
        )
        tokenizer.train_from_iterator(TEXTS, trainer)
        trained.append(tokenizer.get_vocab())
    assert all(each == trained[0] for each in trained)


@rests_on_it("src/lockstep/data/tokenizer.py", "src/lockstep/tasks/text_task.py", "src/lockstep/data/token_checks.py")
def test_truncation_keeps_special_tokens() -> None:
    """Truncation to n tokens counts and keeps the special tokens that the template adds: the first n - 2 tokens of the
    text stay. A limit below the number of special tokens is exceeded: tokenizers 0.23.1 keeps one token of the text in
    addition, 0.23.3 truncates nothing."""
    tokenizer = words([*SPECIAL, "a", "b", "c", "d"])
    ids = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    tokenizer.enable_truncation(4)
    assert tokenizer.encode("a b c d").tokens == ["[CLS]", "a", "b", "[SEP]"]
    tokenizer.enable_truncation(2)
    assert tokenizer.encode("a b c d").tokens == ["[CLS]", "[SEP]"]
    tokenizer.enable_truncation(1)
    assert len(tokenizer.encode("a b c d").tokens) in (3, 6)


@rests_on_it("src/lockstep/data/tokenizer.py")
def test_a_batch_is_encoded_as_its_texts_are() -> None:
    """encode_batch gives each text the same ids as encode."""
    tokenizer = words([*SPECIAL, *sorted({word for text in TEXTS for word in text.split()})])
    assert [each.ids for each in tokenizer.encode_batch(TEXTS)] == [tokenizer.encode(text).ids for text in TEXTS]


@rests_on_it("src/lockstep/data/tokenizer.py")
def test_special_tokens_are_found_in_texts_before_they_are_normalized() -> None:
    """A special token is matched in the text as written, before the normalizer changes the text."""
    tokenizer = words([*SPECIAL, "a", "b", "[sep]"])
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens(["[SEP]"])
    assert tokenizer.encode("A[SEP]B").tokens == ["a", "[SEP]", "b"]


@rests_on_it("src/lockstep/checkpoint/shard_files.py", "src/lockstep/tasks/modules/wrapped_module.py")
def test_safetensors_keep_bits_and_refuse_shared_storage(tmp_path: Path) -> None:
    """save_file keeps every bit, including NaN and -0.0, in bfloat16 and float32, and refuses tensors that share
    storage."""

    tensors = {
        "wide": torch.tensor([float("nan"), -0.0, 1 / 3, float("inf")]),
        "low": torch.tensor([float("nan"), -0.0, 1 / 3], dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "kept.safetensors")
    loaded = load_file(tmp_path / "kept.safetensors")
    assert torch.equal(tensors["wide"].view(torch.int32), loaded["wide"].view(torch.int32))
    assert torch.equal(tensors["low"].view(torch.int16), loaded["low"].view(torch.int16))
    whole = torch.ones(4)
    with pytest.raises(RuntimeError, match="share memory"):
        save_file({"a": whole, "b": whole[:]}, tmp_path / "shared.safetensors")


@rests_on_it("src/lockstep/data/arrow_cache.py", "src/lockstep/data/source.py")
def test_a_stream_is_split_by_whole_shards() -> None:
    """split_dataset_by_node gives each node whole shards if the number of shards is divisible by the number of nodes;
    every row is read exactly once."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    stream = Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=4)
    nodes = [[row["x"] for row in split_dataset_by_node(stream, node, 2)] for node in range(2)]
    assert sorted(nodes[0] + nodes[1]) == list(range(12))
    assert nodes[0] == [0, 1, 2, 6, 7, 8]


@rests_on_it(
    "src/lockstep/tasks/models/source_ties.py",
    "src/lockstep/tasks/models/adapters.py",
    "src/lockstep/tasks/modules/wrapped_module.py",
    "src/lockstep/data/hub.py",
    "src/lockstep/proof/attest.py",
    "src/lockstep/checkpoint/export.py",
    "src/lockstep/proof/against_plain.py",
    "src/lockstep/proof/replay.py",
    "src/lockstep/config/output_files.py",
    "src/lockstep/training/reference_pass.py",
    "src/lockstep/training/plain_sides.py",
)
def test_errors_of_safetensors(tmp_path: Path) -> None:
    """safe_open lists names, and shapes without reading tensors. A truncated, extended or empty file raises
    SafetensorError, which is neither OSError nor RuntimeError; a missing file raises FileNotFoundError. A failed write
    raises SafetensorError with "(os error N)", also on a full disk (saving a tokenizer raises Exception). numpy's
    functions raise the same errors. Tensors that are not contiguous raise ValueError."""
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "file")
    with safe_open(tmp_path / "file", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == {"a": (2, 3), "b": (3,)}
    assert not issubclass(SafetensorError, OSError | RuntimeError | ValueError)
    whole = (tmp_path / "file").read_bytes()
    for content in (whole[:-1], whole + b"x", whole[:4], b""):
        (tmp_path / "damaged").write_bytes(content)
        for read in (load_file, lambda path: safe_open(path, "pt")):
            with pytest.raises(SafetensorError):
                read(tmp_path / "damaged")
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "missing")
    with pytest.raises(SafetensorError, match=r"\(os error 2\)"):
        save_file(tensors, tmp_path / "no such folder" / "file")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # what does not fit is an error, as on a full disk
    try:
        with pytest.raises(SafetensorError, match=rf"\(os error {errno.EFBIG}\)"):
            save_file({"a": torch.ones(1000)}, tmp_path / "large")
        with pytest.raises(SafetensorError, match=rf"\(os error {errno.EFBIG}\)"):
            save_arrays({"a": np.ones(1000)}, tmp_path / "large")
        with pytest.raises(Exception, match=rf"\(os error {errno.EFBIG}\)") as caught:
            words(["[UNK]", *map(str, range(100))]).save(str(tmp_path / "tokenizer.json"))
        assert not isinstance(caught.value, OSError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save_arrays({"a": np.arange(3.0)}, tmp_path / "numbers", {"data": "key"})
    with safe_open(tmp_path / "numbers", "numpy") as file:
        assert file.metadata() == {"data": "key"}
        assert isinstance(file.get_tensor("a"), np.ndarray)
        assert file.get_tensor("a").tolist() == [0.0, 1.0, 2.0]
    os.truncate(tmp_path / "numbers", 20)
    with pytest.raises(SafetensorError):
        safe_open(tmp_path / "numbers", "numpy")
    with pytest.raises(ValueError, match="contiguous"):
        save_file({"a": torch.ones(2, 3).t()}, tmp_path / "file")


@rests_on_it("src/lockstep/data/tokenizer.py")
def test_normalizers_pre_tokenizers_and_decoders() -> None:
    """BertNormalizer lowercases and strips accents and control characters. BertPreTokenizer splits at white space and
    punctuation. Metaspace marks word beginnings by U+2581, ByteLevel by U+0120. NFKC replaces compatibility characters.
    A Sequence of WhitespaceSplit and Punctuation splits at both. The decoders join the pieces again. ByteLevel's
    alphabet has 256 characters."""
    text = "\u00dcn\u00ef\tX\x00"
    assert normalizers.BertNormalizer(lowercase=True).normalize_str(text) == "uni x"
    assert normalizers.NFKC().normalize_str("\ufb01\u2460") == "fi1"
    split = {
        pre_tokenizers.BertPreTokenizer(): ["a", "-", "b", "c", ","],
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]): [
            "a",
            "-",
            "b",
            "c",
            ",",
        ],
        pre_tokenizers.Metaspace(): ["\u2581a-b", "\u2581", "\u2581c,"],
        pre_tokenizers.ByteLevel(add_prefix_space=True): ["\u0120a", "-", "b", "\u0120", "\u0120c", ","],
    }
    for part, pieces in split.items():
        assert [piece for piece, _ in part.pre_tokenize_str("a-b  c,")] == pieces
    assert decoders.Metaspace().decode(["\u2581a", "b", "\u2581c"]) == "ab c"
    assert decoders.ByteLevel().decode(["\u0120a", "\u010a", "\u00c3\u00a9"]) == " a\n\u00e9"
    assert decoders.WordPiece().decode(["a", "##b", ".", "c"]) == "ab. c"
    assert len({*pre_tokenizers.ByteLevel.alphabet()}) == 256


@rests_on_it("src/lockstep/data/tokenizer.py")
def test_special_tokens_and_templates() -> None:
    """add_special_tokens keeps the id of a token in the vocabulary and gives a new token the next id. get_vocab
    includes added tokens. token_to_id of an unknown token is None. TemplateProcessing raises for a special token
    without an id. Trained vocabularies start with the special tokens, in order."""
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.add_special_tokens(["a", "[PAD]"])
    assert (made.get_vocab(), made.token_to_id("b")) == ({"[UNK]": 0, "a": 1, "[PAD]": 2}, None)
    with pytest.raises(ValueError, match="SEP"):
        processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1)])
    kinds: list[tuple[Tokenizer, Any]] = [
        (Tokenizer(models.BPE()), trainers.BpeTrainer),
        (Tokenizer(models.Unigram()), trainers.UnigramTrainer),
        (Tokenizer(models.WordLevel(unk_token="[UNK]")), trainers.WordLevelTrainer),
    ]
    for tokenizer, trainer in kinds:
        options = {"unk_token": "[UNK]"} if trainer is trainers.UnigramTrainer else {}
        trainer = trainer(vocab_size=40, special_tokens=SPECIAL, show_progress=False, **options)
        tokenizer.train_from_iterator(iter([[TEXTS[0]], TEXTS[1:]]), trainer)
        assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2, 3]
        assert tokenizer.get_vocab_size() <= 40


@rests_on_it(
    "src/lockstep/data/token_checks.py",
    "src/lockstep/data/masking.py",
    "src/lockstep/tasks/translation.py",
    "src/lockstep/tasks/models/token_rows.py",
    "src/lockstep/data/tokenizer.py",
    "src/lockstep/data/conversations.py",
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/data/qa_features.py",
    "src/lockstep/lab/import_config/loss_means.py",
    "src/lockstep/plain/scores.py",
    "src/lockstep/tasks/classification.py",
    "src/lockstep/tasks/question_answering.py",
    "src/lockstep/tasks/text_task.py",
    "src/lockstep/tasks/token_classification.py",
)
def test_counts_and_names_of_tokens_in_transformers() -> None:
    """len of a PreTrainedTokenizerFast and get_vocab include tokens added later. convert_ids_to_tokens takes a list or
    an id. num_special_tokens_to_add counts the template's tokens for one text, and with pair=True for a pair.
    batch_decode takes lists and can skip special tokens."""
    from transformers import PreTrainedTokenizerFast

    made = words([*SPECIAL, "one", "two"])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    tokenizer.add_tokens(["three"])
    assert (len(tokenizer), tokenizer.get_vocab()["three"], len(tokenizer.get_vocab())) == (7, 6, 7)
    assert (tokenizer.convert_ids_to_tokens([4, 6]), tokenizer.convert_ids_to_tokens(5)) == (["one", "three"], "two")
    assert (tokenizer.num_special_tokens_to_add(), tokenizer.num_special_tokens_to_add(pair=True)) == (2, 3)
    ids = tokenizer(["one three", ""], return_attention_mask=False, verbose=False)["input_ids"]
    assert ids == [[2, 4, 6, 3], [2, 3]]
    assert [each.split() for each in tokenizer.batch_decode(ids, skip_special_tokens=True)] == [["one", "three"], []]
    assert (tokenizer.is_fast, tokenizer.pad_token_id, tokenizer.eos_token_id) == (True, 0, None)
