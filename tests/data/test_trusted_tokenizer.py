"""A tokenizer with its own code is loaded from the cache and from the export, if the run trusts its code."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lockstep.config.run import load
from lockstep.data import tokenizer
from support.messages import raises

CODE = """
from transformers import PreTrainedTokenizerFast


class Own(PreTrainedTokenizerFast):
    mark = {mark}
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose tokenizer is a user's class."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "source"
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "joy": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own_words.Own"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (folder / "own_words.py").write_text(CODE.format(mark=7))
    return folder


def prepared(source: Path, trusted: bool) -> Path:
    values = {"data": {"source": "builtin/emotion"}, "model": {"type": "gpt2", "trust_remote_code": trusted}}
    return tokenizer.prepare(
        tokenizer.TokenizerChoice.of(load(None, [f"tokenizer.source={source}"], values)), iter(()), "content"
    )


def test_trusted_tokenizer_round_trips(source: Path, tmp_path: Path) -> None:
    folder = prepared(source, True)
    found = tokenizer.load(str(folder), True)
    assert (type(found).__name__, found.mark) == ("Own", 7)  # type: ignore[attr-defined]
    tokenizer.save(found, tmp_path / "export")  # a second time, as in an export
    again = AutoTokenizer.from_pretrained(tmp_path / "export", trust_remote_code=True)
    assert (type(again).__name__, again("joy")["input_ids"]) == ("Own", [2])
    with pytest.raises(ValueError, match="trust_remote_code"):
        tokenizer.load(str(folder))


def test_other_code_is_another_tokenizer(source: Path) -> None:
    before = prepared(source, True)
    (source / "own_words.py").write_text(CODE.format(mark=8))
    after = prepared(source, True)
    assert after != before
    assert tokenizer.load(str(after), True).mark == 8  # type: ignore[attr-defined]


def test_an_untrusted_tokenizer_is_refused(source: Path) -> None:
    with raises("LS2303", "tokenizer.source"):
        prepared(source, False)
