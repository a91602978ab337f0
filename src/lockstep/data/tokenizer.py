"""The tokenizer of a run: the model's own, another one, or one trained on the run's texts.

In: the sections `tokenizer` and `model` of a run, and an iterator over training texts. Out: a folder that
`AutoTokenizer.from_pretrained` loads, in the cache.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.lazy import lazy
from lockstep.config.run import Run, RunError
from lockstep.config.sections import ModelSection, TokenizerSection
from lockstep.data.arrow_cache import digest
from lockstep.data.cache import cached, folder_of, made_with
from lockstep.track.busy import ACTIVITY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lockstep.data import hub
else:
    (hub,) = lazy("lockstep.data", "hub")

TARGET = "target"  # subfolder of a separate target tokenizer
# Kinds whose training depends on hash-table order and is not reproducible (`_inner` removes most of this for
# wordpiece): their folders are named by their content.
_DRAWN = ("wordpiece", "unigram")
_SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}


@dataclass(frozen=True)
class TokenizerChoice:
    """What decides a run's tokenizer: its section, and that of the model, whose tokenizer is the default."""

    section: TokenizerSection
    model: ModelSection

    @classmethod
    def of(cls, run: Run) -> TokenizerChoice:
        return cls(run.tokenizer, run.model)

    @property
    def source(self) -> str | None:
        """Hub id or folder; None without one. Not used for a tokenizer that is trained."""
        return self.section.source or self.model.source

    @property
    def key(self) -> str:
        """The key that names `source`."""
        return "tokenizer.source" if self.section.source else "model.source"

    @property
    def revision(self) -> str:
        return (None if self.section.source else self.model.revision) or "main"


def load(folder: str, trusted: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a prepared folder. `trusted`: allow it to run its own code."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)


def save(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer so that `from_pretrained` loads it, even with its own code: transformers writes only its class
    name but reads a pair of names (slow and fast class)."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    auto_map = values.get("auto_map")
    if isinstance(auto_map, dict) and isinstance(name := auto_map.get("AutoTokenizer"), str):
        auto_map["AutoTokenizer"] = [None, name] if tokenizer.is_fast else [name, None]
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class TokenTypes:
    """The `token_type_ids` that a tokenizer writes for a single text: `of_text`, and those of the special tokens before
    and after it (XLNet has 2 for the last)."""

    of_text: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> TokenTypes:
        encoded = tokenizer("a", return_special_tokens_mask=True)
        types, special = tuple(encoded["token_type_ids"]), list(encoded["special_tokens_mask"])
        if 0 not in special:
            return cls(0, types, ())
        first, last = special.index(0), len(special) - special[::-1].index(0)
        return cls(types[first], types[:first], types[last:])

    @property
    def written(self) -> set[int]:
        """The different types of the tokens of a text."""
        return {self.of_text, *self.before, *self.after}

    def padded(self, mask: np.ndarray) -> np.ndarray:
        """The types of texts padded on the right, int64 [B, T]; 0 at padding. `mask`: 1 at real tokens, [B, T]."""
        types = np.zeros_like(mask)
        for row, length in zip(types, mask.sum(1).tolist(), strict=True):
            inner = length - len(self.before) - len(self.after)  # negative: cut to fewer tokens than these
            row[:length] = (*self.before, *[self.of_text] * inner, *self.after)[:length]
        return types


def without_types(tokenizer: Any) -> Any:
    """A copy of a tokenizer that writes no `token_type_ids`, neither now nor when it is saved and loaded."""
    names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    tokenizer = copy.copy(tokenizer)
    tokenizer.model_input_names = names
    tokenizer.init_kwargs = tokenizer.init_kwargs | {"model_input_names": names}
    return tokenizer


def prepare(
    choice: TokenizerChoice,
    texts: Iterator[list[str]],
    content: str,
    generative: bool = False,
    of_target: bool = False,
) -> Path:
    """Return the folder of the run's tokenizer, with a padding token.

    The caller holds the lock. `content` identifies the texts. `generative`: a trained tokenizer appends its end token
    to every text and prepends nothing. `of_target`: one of two tokenizers, to which `model.config.vocab_size` does not
    apply. Errors: `RunError`."""
    folder, model = _folder(choice, texts, content, generative), choice.model
    if not of_target and model.type is not None and "vocab_size" in (model.config or {}):
        embeddings_of(model, load(str(folder), model.trust_remote_code))
    return folder


def highest_id(tokenizer: Any) -> int:
    """The highest id of a tokenizer; at least its number of tokens less one, as ids may have gaps."""
    return max(len(tokenizer) - 1, *tokenizer.get_vocab().values())


def embeddings_of(section: ModelSection, tokenizer: Any) -> int:
    """Number of embeddings of a model from scratch: one per id up to the tokenizer's highest, or more if configured.
    Errors: `RunError` if `model.config` requests fewer."""
    vocab_size, needed = (section.config or {}).get("vocab_size"), highest_id(tokenizer) + 1
    if vocab_size is None:
        return needed
    if not isinstance(vocab_size, int) or vocab_size < needed:
        raise RunError(
            "LS2300",
            f"model.config.vocab_size: {vocab_size!r} is less than the {needed:,} rows that the ids of the "
            f"tokenizer's {len(tokenizer):,} tokens need; raise it",
        )
    return vocab_size


def _folder(choice: TokenizerChoice, texts: Iterator[list[str]], content: str, generative: bool) -> Path:
    if choice.section.train is not None:
        kind = "generative" if generative else _causal(choice.model)
        key = digest("tokenizer", 1, choice.section.model_dump(), content, kind)
        drawn = choice.section.train in _DRAWN
        key = digest("tokenizer", 2, key) if drawn else key
        folder = cached(folder_of("tokenizers") / key, lambda aside: save(_train(choice, texts, generative), aside))
        return _in_cache(load(str(folder)), "tokenizer.train") if drawn else folder  # named by its content
    if choice.source is None:
        raise RunError(
            "LS2301",
            "tokenizer: missing; a model from scratch (model.type) needs a tokenizer: set tokenizer.train "
            "(bpe, wordpiece, wordlevel, unigram, character) or tokenizer.source",
        )
    return _in_cache(_load_source(choice, choice.source), choice.source)


def of_targets(choice: TokenizerChoice) -> Path | None:
    """Folder of a separate target tokenizer that came with the run's model or tokenizer, as in lockstep's exports; None
    if there is none. The caller holds the lock. Errors: `RunError`."""
    source = choice.source
    if choice.section.train is not None or source is None:
        return None
    if hub.optional_file(_local(source), "tokenizer_config.json", choice.revision, TARGET) is None:
        return None
    return _in_cache(_load_source(choice, source, subfolder=TARGET), f"{source}/{TARGET}")


def _in_cache(tokenizer: Any, source: str) -> Path:
    """Cache a tokenizer loaded from `source`, with a padding token; return its folder. Errors: `RunError`."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise RunError(
            "LS2302",
            f"tokenizer: the tokenizer of {source} has neither a padding token nor an end token to pad with; "
            "set one in its files, or choose another tokenizer",
        )
    state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(sorted(tokenizer.get_vocab().items()))
    parts = [hashlib.sha256(state.encode()).hexdigest(), str(tokenizer.special_tokens_map)]
    if "auto_map" in tokenizer.init_kwargs:  # custom code, saved with it
        parts.append(Path(inspect.getfile(type(tokenizer))).read_text(encoding="utf-8"))
    parts += [f"{key}={getattr(tokenizer, key)}" for key in _CHANGING if _differs(tokenizer, key)]
    key = digest("tokenizer", 1, *parts)
    with tempfile.TemporaryDirectory() as folder:
        save(tokenizer, Path(folder) / "whole")
        made_with(_content(Path(folder)))
    return cached(folder_of("tokenizers") / key, lambda aside: save(tokenizer, aside))


# Settings that affect tokens but are not part of a fast tokenizer's state.
_CHANGING = {"truncation_side": "right", "split_special_tokens": False, "model_input_names": None}


def _differs(tokenizer: Any, key: str) -> bool:
    usual = getattr(type(tokenizer), key, _CHANGING[key]) if _CHANGING[key] is None else _CHANGING[key]
    return getattr(tokenizer, key, usual) != usual


def _content(folder: Path) -> str:
    """Hash of a tokenizer's files, including its chat template."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return digest([(str(f.relative_to(folder)), hashlib.sha256(f.read_bytes()).hexdigest()) for f in files])


def written_by(usage: str, tokenizer: Any, template: str | None, talks: bool, most: int, room: int) -> str:
    """Python code that generates text with a model. `talks`: as a conversation, with the chat template (None: the
    tokenizer's). `most`: tokens to generate, if the model's `room` tokens must also hold the question."""
    question = [{"role": "user", "content": "some text"}]
    text = '"some text"'
    question_length = room // 2
    if not talks:
        question_length = len(tokenizer("some text")["input_ids"])
    else:
        text = json.dumps(question)
        with suppress(Exception):  # templates may raise anything
            question_length = len(
                tokenizer.apply_chat_template(
                    question, chat_template=template, add_generation_prompt=True, return_dict=False
                )
            )
    return usage.replace(
        '"some text"', f"{text}, max_new_tokens={max(1, min(most, room // 2, room - question_length))}"
    )


def template_of(tokenizer: Any, run_file_template: str | None) -> list[Any]:
    """The chat template's part of a key; empty if the run file sets one, because the key then contains it already."""
    if run_file_template is not None:
        return []
    return [hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest()]


def pair(source: Path, target: Path) -> Path:
    """Create one folder for two tokenizers, the target's in its subfolder `target`."""

    def make(aside: Path) -> None:
        shutil.copytree(source, aside)
        shutil.copytree(target, aside / TARGET)

    return cached(folder_of("tokenizers") / digest("pair", source.name, target.name), make)


def _load_source(choice: TokenizerChoice, source: str, **place: str) -> Any:
    from transformers import AutoTokenizer

    key, revision, trusted = choice.key, choice.revision, choice.model.trust_remote_code
    source = _local(source, key)
    if Path(source).is_dir():
        _refuse_folder(Path(source), key)
    try:
        with hub.downloading(source, "model"):
            return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trusted, **place)
    except Exception as error:  # missing file, unreachable Hub, unknown type: user errors
        raise RunError(
            "LS2303", f"{key}: cannot load a tokenizer from {source!r}: {hub.explained(error, revision)}"
        ) from error


def _refuse_folder(folder: Path, key: str) -> None:
    """Refuse a local folder without a model or tokenizer. Errors: `RunError`."""
    names = {file.name for file in folder.iterdir()}
    if key == "model.source" and not names & {"config.json", "adapter_config.json"}:
        file_names = ", ".join(sorted(names)[:5]) or "nothing"
        raise RunError(
            "LS2330",
            f"model.source: {folder} has no config.json, so it is not a model folder; it holds {file_names}. Give "
            "the folder that save_pretrained wrote, or the export folder of a run",
        )
    if not any(re.search(r"token|vocab|merges|\.model$|spiece|\.tiktoken$", name) for name in names):
        raise RunError(
            "LS2331",
            f"{key}: {folder} holds no tokenizer (no tokenizer.json, vocab.txt or the like). "
            "Save the tokenizer there, or "
            "set tokenizer.source to a Hub id or folder that has one",
        )


def _local(source: str, key: str = "tokenizer.source or model.source") -> str:
    """The local folder, or the Hub id."""
    source = hub.model_folder(source, key)
    path = Path(source).expanduser()
    return str(path) if path.is_dir() else source


def _causal(section: ModelSection) -> bool:
    """Return whether the model is causal, and is therefore read at its last token rather than its first."""
    from transformers.models.auto import modeling_auto

    kind = section.type
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in masked


def _train(choice: TokenizerChoice, texts: Iterator[list[str]], generative: bool) -> Any:
    """Train a tokenizer. Encoders get `[CLS] text [SEP]`; decoders get `text [SEP]` and are read at [SEP]."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    kind, size = choice.section.train, choice.section.vocab_size
    special, unknown = list(_SPECIAL.values()), _SPECIAL["unk_token"]
    options: dict[str, Any] = {"vocab_size": size, "special_tokens": special, "show_progress": False}
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token=unknown, **options)
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token=unknown))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        texts, inner = _inner(tokenizer, texts)
        trainer = trainers.WordPieceTrainer(**options | {"special_tokens": [*special, *inner]})
    elif kind == "character":
        tokenizer = Tokenizer(models.WordLevel(unk_token=unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        trainer = trainers.WordLevelTrainer(**options)
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token=unknown))
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
        )
        trainer = trainers.WordLevelTrainer(**options)
    ACTIVITY.set(f"training a tokenizer ({kind}, at most {size:,} entries)")
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "wordpiece":
        tokenizer = _with_model(tokenizer, models.WordPiece(tokenizer.get_vocab(), unk_token=unknown))
        tokenizer.add_special_tokens(special)
    start = "" if generative or _causal(choice.model) else "[CLS] "
    pair = f"{start}$A:0 [SEP]:0 $B:1 [SEP]:1"
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{start}$A [SEP]", pair=pair, special_tokens=ids)
    ends = {"bos_token": _SPECIAL["cls_token"], "eos_token": _SPECIAL["sep_token"]} if generative else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL, **ends)


def _inner(tokenizer: Any, texts: Iterator[list[str]]) -> tuple[Iterator[list[str]], list[str]]:
    """The texts again, and the sorted one-character pieces that continue a word in them. The library would number these
    in hash-table order, and merges depend on the numbers."""
    from tokenizers import models, trainers

    kept_texts = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed when they have been read

    def first() -> Iterator[list[str]]:
        for batch in texts:
            kept_texts.write(json.dumps(batch) + "\n")
            yield batch

    def again() -> Iterator[list[str]]:
        with kept_texts:
            kept_texts.seek(0)
            yield from map(json.loads, kept_texts)

    short = _with_model(tokenizer, models.WordPiece(unk_token=_SPECIAL["unk_token"]))
    short.train_from_iterator(first(), trainers.WordPieceTrainer(vocab_size=1, show_progress=False))
    return again(), sorted(piece for piece in short.get_vocab() if piece.startswith("##") and len(piece) == 3)


def _with_model(tokenizer: Any, model: Any) -> Any:
    """A tokenizer with another model and the same text processing."""
    from tokenizers import Tokenizer

    new_tokenizer = Tokenizer(model)
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if (part := getattr(tokenizer, name)) is not None:
            setattr(new_tokenizer, name, part)
    return new_tokenizer
