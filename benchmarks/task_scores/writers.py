"""Models that write, from scratch, beside Trainer, Seq2SeqTrainer and TRL's SFTTrainer; both sides start from one
folder.

In: the data folder. Out: perplexity, BLEU, chrF and ROUGE of the test split, made here in the same way for both models,
by sacrebleu and rouge_score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import texts
import torch
from sides import Recipe, ours, settings

PLAYS = Recipe(rows=1280, batch=32, rate=3e-3, micro_batches=2, length=64)  # rows: blocks
SPEECHES = Recipe(rows=1280, batch=32, rate=3e-3, micro_batches=2, length=256)
CAPTIONS = Recipe(rows=4800, batch=64, rate=3e-3, micro_batches=2, length=48)
END = "<|endoftext|>"
GPT2 = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 256}
MARIAN = {
    "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512,
    "max_position_embeddings": 64, "dropout": 0.1,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<reply> {% generation %}{{ m['content'] }}" + END
    + "{% endgeneration %}{% else %}<ask> {{ m['content'] }}" + END + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<reply> {% endif %}"
)  # fmt: skip


def tokenizer(read: Iterable[str], closes: bool, vocabulary: int = 3000) -> Any:
    """Byte-level BPE. `closes`: texts end with the end token."""
    import transformers
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing

    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(read, vocabulary, special_tokens=[END, "<pad>"], show_progress=False)
    if closes:
        template = TemplateProcessing(single=f"$A {END}", special_tokens=[(END, learned.token_to_id(END))])
        learned._tokenizer.post_processor = template
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned._tokenizer, eos_token=END, bos_token=END, unk_token=END, pad_token="<pad>"
    )


def begun(room: Path, known: Any, kind: str, **entries: Any) -> Path:
    """A folder with a model that has learned nothing: where both sides start."""
    import transformers

    transformers.set_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=len(known), pad_token_id=known.pad_token_id, eos_token_id=known.eos_token_id,
        bos_token_id=known.bos_token_id, **entries,
    )  # fmt: skip
    auto = transformers.AutoModelForSeq2SeqLM if kind == "marian" else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(room)
    known.save_pretrained(room)
    return room


def lost(model: Any, batches: Iterable[dict[str, torch.Tensor]]) -> float:
    """Perplexity of `labels`, which a model of transformers moves on by itself, or its decoder reads one behind."""
    total, count = 0.0, 0
    for batch in batches:
        targets = int((batch["labels"][:, 0 if model.config.is_encoder_decoder else 1 :] >= 0).sum())
        with torch.no_grad():
            total += float(model.eval()(**batch).loss) * targets
        count += targets
    return math.exp(total / count)


def cut(ids: list[int], size: int) -> list[list[int]]:
    """Blocks that are all full."""
    return [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]


# -- plays -----------------------------------------------------------------------------------------------------------


def plays(data: Path, model: Path, room: Path, seed: int) -> dict[str, Any]:
    import transformers

    folder = texts.plays(data, room / "data")
    read = {split: (folder / f"{split}.txt").read_text(encoding="utf-8") for split in ("train", "test")}
    known = tokenizer(read["train"].split("\n\n"), False)
    start = begun(room / "start", known, "gpt2", **GPT2)
    tokens = {split: known(text, verbose=False)["input_ids"] for split, text in read.items()}
    size = PLAYS.length
    blocks = {split: [{"input_ids": part, "labels": part} for part in cut(ids, size)] for split, ids in tokens.items()}
    task = {"name": "language_modeling", "block_size": size, "samples": 0}
    mine = ours(room / "ours", PLAYS, seed, task, {"source": str(start)}, folder)
    learned = transformers.AutoModelForCausalLM.from_pretrained(start)
    arguments = transformers.TrainingArguments(**settings(room / "theirs", PLAYS, seed))
    transformers.Trainer(
        learned, arguments, train_dataset=blocks["train"], data_collator=transformers.default_data_collator
    ).train()
    test = [transformers.default_data_collator(blocks["test"][i : i + 32]) for i in range(0, 320, 32)]
    models = {
        "before": transformers.AutoModelForCausalLM.from_pretrained(start),
        "lockstep": transformers.AutoModelForCausalLM.from_pretrained(mine["export"]),
        "Trainer": learned,
    }
    return {side: {"perplexity": lost(each, test)} for side, each in models.items()} | {
        "lockstep, as it says": mine["scores"]
    }


def speeches(data: Path, model: Path, room: Path, seed: int) -> dict[str, Any]:
    """What is answered in a play: only the second and the fourth speech of a scene are learned."""
    import transformers
    import trl
    from datasets import Dataset

    folder = texts.speeches(data, room / "data", SPEECHES.rows)
    train, test = texts.read(folder / "train.jsonl"), texts.read(folder / "test.jsonl")
    known = tokenizer((m["content"] for row in train for m in row["messages"]), False)
    known.chat_template = TEMPLATE
    start = begun(room / "start", known, "gpt2", **GPT2)
    size = SPEECHES.length
    task = {"name": "language_modeling", "messages": "messages", "block_size": size, "samples": 0}
    mine = ours(room / "ours", SPEECHES, seed, task, {"source": str(start)}, folder)
    learned = transformers.AutoModelForCausalLM.from_pretrained(start)
    arguments = trl.SFTConfig(**settings(room / "theirs", SPEECHES, seed), max_length=size, assistant_only_loss=True)
    trl.SFTTrainer(learned, arguments, train_dataset=Dataset.from_list(train), processing_class=known).train()

    def asked() -> Iterable[dict[str, torch.Tensor]]:
        for row in test:
            found = known.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
            ids = torch.tensor([found["input_ids"][:size]])
            said = torch.tensor([found["assistant_masks"][:size]])
            yield {"input_ids": ids, "labels": ids.masked_fill(said == 0, -100)}

    models = {
        "before": transformers.AutoModelForCausalLM.from_pretrained(start),
        "lockstep": transformers.AutoModelForCausalLM.from_pretrained(mine["export"]),
        "TRL": learned,
    }
    return {side: {"perplexity": lost(each, asked())} for side, each in models.items()} | {
        "lockstep, as it says": mine["scores"]
    }


# -- one text for another --------------------------------------------------------------------------------------------


def by_sacrebleu(written: list[str], wanted: list[str]) -> dict[str, float]:
    from sacrebleu.metrics import BLEU, CHRF

    return {"bleu": BLEU().corpus_score(written, [wanted]).score, "chrf": CHRF().corpus_score(written, [wanted]).score}


def by_rouge(written: list[str], wanted: list[str]) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    names = ["rouge1", "rouge2", "rougeL"]
    each = [RougeScorer(names).score(right, one) for right, one in zip(wanted, written, strict=True)]
    return {name: 100 * sum(one[name].fmeasure for one in each) / len(each) for name in names}


def captions(
    task: str, sides: tuple[str, str], score: Callable[[list[str], list[str]], dict[str, float]],
    data: Path, model: Path, room: Path, seed: int,
) -> dict[str, Any]:  # fmt: skip
    import transformers
    from datasets import Dataset

    source, target = sides
    folder = texts.translations(data, room / "data", CAPTIONS.rows)
    train, test = texts.read(folder / "train.jsonl"), texts.read(folder / "test.jsonl")
    known = tokenizer((row[side] for row in train for side in sides), True)
    start = begun(
        room / "start", known, "marian", **MARIAN, decoder_start_token_id=known.pad_token_id, forced_eos_token_id=None,
        decoder_vocab_size=len(known), scale_embedding=True,
    )  # fmt: skip
    keys = {"name": task, "source": source, "target": target, "samples": 0}
    mine = ours(room / "ours", CAPTIONS, seed, keys, {"source": str(start)}, folder, evaluate={"every": 0})

    def encoded(rows: list[dict]) -> Dataset:
        limit = {"truncation": True, "max_length": CAPTIONS.length, "return_attention_mask": True}
        found = known([row[source] for row in rows], **limit)
        wanted = known([row[target] for row in rows], **limit)["input_ids"]
        kept = {name: found[name] for name in ("input_ids", "attention_mask")}
        return Dataset.from_dict(kept | {"labels": wanted})

    learned = transformers.AutoModelForSeq2SeqLM.from_pretrained(start)
    collator = transformers.DataCollatorForSeq2Seq(known, model=learned)
    arguments = transformers.Seq2SeqTrainingArguments(**settings(room / "theirs", CAPTIONS, seed))
    transformers.Seq2SeqTrainer(learned, arguments, train_dataset=encoded(train), data_collator=collator).train()
    rows = list(encoded(test))

    def judged(one: Any) -> dict[str, float]:
        made = [collator([dict(row) for row in rows[i : i + 50]]) for i in range(0, len(rows), 50)]
        written: list[str] = []
        for batch in made:
            asked = {name: batch[name] for name in ("input_ids", "attention_mask")}
            tokens = one.eval().generate(**asked, max_new_tokens=CAPTIONS.length, num_beams=1, do_sample=False)
            written += [text.strip() for text in known.batch_decode(tokens, skip_special_tokens=True)]
        return {"perplexity": lost(one, made)} | score(written, [row[target] for row in test])

    return {
        "lockstep": judged(transformers.AutoModelForSeq2SeqLM.from_pretrained(mine["export"])),
        "Seq2SeqTrainer": judged(learned),
        "lockstep, as it says": mine["scores"],
    }


RECIPES = {
    "plays": plays,
    "speeches": speeches,
    "translation": partial(captions, "translation", ("en", "de"), by_sacrebleu),
    "summarization": partial(captions, "summarization", ("de", "en"), by_rouge),
}
