"""Small configs of every model family, by head, and folders of models and tokenizers from which runs start.

In: a head and a family. Out: entries of `model.config`; a folder as `model.source` or `tokenizer.source` names it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from crossed import images, modules

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
_RECORD = _BENCHMARKS / "results" / "2026-11-22-families.jsonl"
_HEADS = {"classification": "bert", "token_classification": "bert", "causal": "gpt2", "seq2seq": "bart"}
# Of heads that the record has not: each family here is known to have the head.
_OTHERS = {
    "masked": "bert albert roberta distilbert electra deberta-v2 modernbert mpnet xlm-roberta camembert ernie esm "
    "eurobert fnet funnel ibert longformer mobilebert mra nystromformer rembert roformer squeezebert yoso convbert "
    "big_bird data2vec-text megatron-bert roberta-prelayernorm xlm xmod",
    "embedding": "bert albert roberta distilbert electra deberta-v2 modernbert mpnet xlm-roberta gpt2 llama mistral "
    "qwen2 qwen3 gemma gemma2 phi3 eurobert nomic_bert opt bloom gpt_neox",
    "question_answering": "bert albert roberta distilbert electra deberta-v2 modernbert mpnet xlm-roberta bart gpt2 "
    "ernie funnel ibert longformer mobilebert squeezebert xlnet llama qwen2 qwen3",
}


def words(text: str) -> list[str]:
    return text.split()


# Families whose products can be cut into leaves (docs/explanation/strategies/9-tensor.md), as far as it is known.
CUT = {
    *words(
        "bert roberta xlm-roberta electra gpt2 t5 mt5 llama mistral ministral qwen2 qwen3 gemma gemma2 gemma3_text phi"
    ),
    *words("olmo helium nemotron starcoder2 smollm3 seed_oss exaone4 eurobert arcee gpt_neox cohere granite"),
}


@functools.cache
def known() -> dict[str, list[str]]:
    """Return head -> families that one process trains (docs/reference/families.md), the plainest first."""
    found: dict[str, list[str]] = {head: [plain] for head, plain in _HEADS.items()}
    for line in _RECORD.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry.get("single") == "trains" and entry["family"] not in found[entry["head"]]:
            found[entry["head"]].append(entry["family"])
    return (
        found
        | {head: names.split() for head, names in _OTHERS.items()}
        | {"image": [*images.FAMILIES], "module": [*modules.FAMILIES]}
    )


@functools.cache
def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_families", _BENCHMARKS / "families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(family: str, dropout: bool, leaves: int = 1) -> dict[str, Any]:
    """Return the config entries that make a family small. Without `dropout`, entries that disable it are added; with
    `leaves`, the number of heads is divisible by it."""
    import transformers

    if family in modules.FAMILIES:
        return {}
    entries: dict[str, Any] = images.FAMILIES[family][0] if family in images.FAMILIES else _benchmark().small(family)
    kind = transformers.CONFIG_MAPPING[family]
    if leaves > 1 and family in CUT:
        counts = {"num_attention_heads": 4, "num_key_value_heads": leaves}
        named = {kind.attribute_map.get(name, name): count for name, count in counts.items()}
        entries |= {name: count for name, count in named.items() if name in entries}
        entries |= {"head_dim": 8} if family == "helium" else {}  # whose output projection is square
    return entries if dropout else _without_dropout(kind(), entries)


def _without_dropout(usual: Any, entries: dict[str, Any]) -> dict[str, Any]:
    """Set every dropout and layer-drop rate of a config, and of nested configs, to 0."""
    found = dict(entries)
    for name, value in usual.to_dict().items():
        dropped = any(part in name for part in ("drop", "stochastic_depth", "jitter"))
        if dropped and isinstance(value, float):
            found[name] = 0.0
        if dropped and isinstance(value, list) and all(isinstance(each, float) for each in value):
            found[name] = [0.0] * len(value)
    for name in type(usual).sub_configs:
        part = getattr(usual, name, None)
        if part is not None and hasattr(part, "to_dict"):
            found[name] = _without_dropout(part, found.get(name) or {})
    return found


def make_tokenizer(folder: Path, recipe: dict[str, Any], texts: list[str]) -> None:
    """A tokenizer of transformers in a folder, trained on texts. `recipe`: `side` that is padded, and whether it has a
    `pad` token of its own."""
    import tokenizers
    import transformers

    specials = ["<unk>", "<s>", "</s>", "<mask>", *(["<pad>"] if recipe.get("pad", True) else [])]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=recipe.get("vocab_size", 400),
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    if recipe.get("framed"):
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B </s>",
            special_tokens=[(t, inner.token_to_id(t)) for t in ("<s>", "</s>")],
        )
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    names |= {"cls_token": "<s>", "sep_token": "</s>"} if recipe.get("framed") else {}
    if recipe.get("pad", True):
        names["pad_token"] = "<pad>"
    side = recipe.get("side", "right")
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, padding_side=side, **names).save_pretrained(folder)


def make_model(folder: Path, head: str, family: str, entries: dict[str, Any], tokenizer: Path) -> None:
    """Save a small model with random weights from a fixed seed, in place of a pretrained one."""
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    from lockstep.tasks.models import heads
    from lockstep.tasks.models.model_configs import texts

    tokens = transformers.AutoTokenizer.from_pretrained(tokenizer)
    config = transformers.CONFIG_MAPPING[family](**entries)
    for part in texts(config):
        part.vocab_size = len(tokens)
        if hasattr(part, "decoder_vocab_size"):
            part.decoder_vocab_size = len(tokens)
        for name in ("pad", "bos", "eos"):
            with contextlib.suppress(StrictDataclassError):  # a family that cannot be without one keeps its own
                setattr(part, f"{name}_token_id", getattr(tokens, f"{name}_token_id"))
    if head == "seq2seq":
        config.decoder_start_token_id = config.bos_token_id
    if family == "encoder-decoder":  # as `from_encoder_decoder_pretrained` has it
        config.decoder.is_decoder = config.decoder.add_cross_attention = True
    torch.manual_seed(5)
    bare = {"classification", "token_classification", "question_answering", "embedding"}
    auto = "AutoModel" if head in bare and family not in ("bart", "mbart", "t5") else heads.of(head).auto
    config.architectures = config.architectures or []  # which transformers walks through for a Funnel
    model = getattr(transformers, auto).from_config(config)
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
