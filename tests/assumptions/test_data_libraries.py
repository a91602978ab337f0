"""What lockstep assumes about tokenizers, datasets and safetensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

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
def test_wordpiece_and_unigram_alone_differ_between_processes_and_word_level_does_not() -> None:
    """Plain WordPiece training and Unigram training give different vocabularies, ids or scores in different processes,
    so ranks must not each train one; WordLevel training gives the same, also for words of one count."""
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
def test_truncation_keeps_what_the_template_adds() -> None:
    """Truncation to n tokens counts the special tokens that the template adds, and keeps them: the first n - 2 tokens
    of the text stay. A limit below the number of special tokens is not held: tokenizers 0.23.1 keeps a
    token of the text besides, 0.23.3 truncates nothing."""
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
    from safetensors.torch import load_file, save_file

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
def test_a_stream_splits_by_shards_in_turns() -> None:
    """split_dataset_by_node gives each node whole shards if their number is divisible by the nodes; every row is read
    exactly once."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    stream = Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=4)
    nodes = [[row["x"] for row in split_dataset_by_node(stream, node, 2)] for node in range(2)]
    assert sorted(nodes[0] + nodes[1]) == list(range(12))
    assert nodes[0] == [0, 1, 2, 6, 7, 8]
