"""Token types: a model is given those of its tokenizer where transformers' `Trainer` gives them, and an exported
tokenizer writes them only then."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from lockstep.data.job import Job
from lockstep.data.tokenizer import TokenTypes
from lockstep.plain.examples import Plain
from lockstep.plain.losses import inputs_of
from lockstep.tasks.models import heads, models
from lockstep.tasks.models.model_configs import ModelChoice
from lockstep.tasks.task import make_task
from support.harness import tiny
from support.messages import raises

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
SPECIAL = ["<pad>", "<sep>", "<cls>", "<mask>", "<unk>"]
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
BERT = {"type": "bert", "config": LAYERS | {"max_position_embeddings": 16}}
GPT2 = {"type": "gpt2", "config": {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16}}
XLNET = {"type": "xlnet", "config": {"n_layer": 1, "n_head": 2, "d_model": 16, "d_inner": 16}}
FLAUBERT = {"type": "flaubert", "config": {"n_layers": 1, "n_heads": 2, "emb_dim": 16}}
XLM = {"type": "xlm", "config": {"n_layers": 1, "n_heads": 2, "emb_dim": 16}}


def a_tokenizer(folder: Path, template: str, side: str) -> dict[str, str]:
    """Save a tokenizer that writes token types by a template; return it as the section `tokenizer`."""
    core = Tokenizer(WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, "<unk>"))
    core.pre_tokenizer = Whitespace()
    around = [(token, SPECIAL.index(token)) for token in ("<sep>", "<cls>")]
    core.post_processor = TemplateProcessing(single=template, pair="$A:0 <sep>:0 $B:1 <sep>:1", special_tokens=around)
    tok = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        sep_token="<sep>",
        cls_token="<cls>",
        mask_token="<mask>",
        unk_token="<unk>",
        padding_side=side,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tok.save_pretrained(folder)
    return {"source": str(folder)}


def a_run(folder: Path, tokenizer: dict[str, str], model: dict[str, Any], task: dict[str, Any]) -> Any:
    texts = [" ".join(WORDS[: 1 + i % 8]) + " <cls> one" * (i == 3) for i in range(12)]
    rows = [
        {
            "text": text,
            "other": text[::-1],
            "label": "ab"[i % 2],
            "words": text.split(),
            "tags": ["X"] * len(text.split()),
        }
        for i, text in enumerate(texts)
    ]
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "validation.jsonl").write_text(
        "\n".join(json.dumps(row | {"text": row["text"] + " two"}) for row in rows)
    )
    data = {"source": str(folder), "max_length": 12, "limit": None, "deduplicate": False}
    return tiny(data=data, tokenizer=tokenizer, model=model, task=task, micro_batches=2)


TAGS = {"name": "token_classification", "words": "words", "tags": "tags"}
CLASSES = {"name": "classification", "text": "text", "label": "label"}
MASKED = {"name": "masked_language_modeling", "packing": False}
VECTORS = {"name": "embedding", "anchor": "text", "positive": "other"}
PLAIN, AT_END = "$A:0 <sep>:0", "$A:0 <sep>:0 <cls>:2"
CASES = {  # model, task, template of a single text, and whether the model is given token types
    "gpt2": (GPT2, CLASSES, PLAIN, True),
    "gpt2-tags": (GPT2, TAGS, PLAIN, True),
    "gpt2-vectors": (GPT2, VECTORS, PLAIN, True),
    "xlnet": (XLNET, CLASSES, AT_END, True),
    "xlm-masked": (XLM, MASKED, PLAIN, True),
    "xlm-packed": (XLM, MASKED | {"packing": True}, PLAIN, True),
    "xlm-packed-types": (XLM, MASKED | {"packing": True}, AT_END, False),
    "bert": (BERT, CLASSES, "<cls>:0 $A:0 <sep>:0", False),  # missing types are zeros
    "bert-ones": (BERT, CLASSES, "<cls>:1 $A:1 <sep>:1", True),
    "gpt2-writes": (GPT2, {"name": "language_modeling", "text": "text", "block_size": 12}, PLAIN, False),  # as TRL
    "llama": ({"type": "llama", "config": LAYERS}, CLASSES, PLAIN, False),  # takes none
}


def test_models_are_given_the_token_types_that_trainer_gives(tmp_path: Path) -> None:
    for name, (model, task_section, template, gives) in CASES.items():
        own = tmp_path / name
        section = a_tokenizer(own / "tokenizer", template, "left" if "xlnet" in name else "right")
        run = a_run(own / "data", section, model, task_section)
        task: Any = make_task(Job.of(run).with_data())
        columns, rows = task.splits["train"], np.arange(len(task.splits["train"]))
        batch = task.collate(columns, rows, 0).inputs
        assert ("token_type_ids" in batch) == gives, name
        tok = transformers.AutoTokenizer.from_pretrained(task.prepared.tokenizer)
        assert tok.model_input_names.count("token_type_ids") == 1
        if gives and task_section is not VECTORS and not task_section.get("packing"):
            column = "words" if task_section is TAGS else "text"
            lines = [json.loads(line)[column] for line in (own / "data" / "train.jsonl").read_text().splitlines()]
            encoded = [
                tok(text, truncation=True, max_length=12, is_split_into_words=column == "words") for text in lines
            ]
            for row, one in enumerate(encoded):
                real = batch["attention_mask"][row].bool()
                assert batch["token_type_ids"][row][real].tolist() == one["token_type_ids"], (name, row)
            _compare_outputs(task, batch, transformers.DataCollatorWithPadding(tok)(encoded), name)
        plain = Plain(json.loads(run.model_dump_json()), task.prepared.tokenizer)
        first = plain.examples("train")[0]
        example = first["texts"][0] if "texts" in first else first
        if gives and task_section is CLASSES:
            reference = inputs_of(plain, plain.examples("train"), "cpu")
            assert all(torch.equal(values, reference[key]) for key, values in batch.items()), name
        if name != "bert":
            assert ("token_type_ids" in example) == gives, name
        folder = own / "export"
        task.write(folder, task.model().state_dict())
        written = transformers.AutoTokenizer.from_pretrained(folder)("one two")
        assert ("token_type_ids" in written) == (gives or name == "bert"), name
        assert any("token_type_ids" in note for note in task.prepared.facts.get("notes", [])) == (
            not gives and name != "bert"
        ), name
        if task_section is CLASSES and gives:
            _compare_prediction(task, folder, name)


def test_a_summary_of_places_that_may_be_padding_is_refused() -> None:
    for model, kind, expected in (
        (XLM, "last", "first"),
        (FLAUBERT, "mean", "first"),
        (XLNET, "mean", "last or first"),
    ):
        run = tiny(model=model | {"config": model["config"] | {"summary_type": kind}})
        with raises("LS3194", kind, expected):
            models.check(ModelChoice.of(run), heads.CLASSIFICATION)
    models.check(ModelChoice.of(tiny(model=XLNET)), heads.CLASSIFICATION)
    tags = tiny(model=XLM | {"config": XLM["config"] | {"summary_type": "mean"}})
    models.check(ModelChoice.of(tags), heads.TOKEN_CLASSIFICATION)


def _compare_outputs(task: Any, ours: dict[str, torch.Tensor], theirs: Any, name: str) -> None:
    """The outputs at real tokens are those of a batch of `DataCollatorWithPadding`, wherever it pads."""
    torch.manual_seed(0)
    model = task.model().eval()
    inputs = {k: v for k, v in theirs.items() if k in inspect.signature(model.forward).parameters}
    assert "token_type_ids" in inputs
    if task.run.task.name == "masked_language_modeling":
        inputs["input_ids"][:] = ours["input_ids"]
    with torch.no_grad():
        one, other = model(**ours).logits, model(**inputs).logits
    if one.ndim == 3:
        one, other = one[ours["attention_mask"].bool()], other[inputs["attention_mask"].bool()]
    assert torch.allclose(one, other, atol=1e-5), name


def _compare_prediction(task: Any, folder: Path, name: str) -> None:
    (answer,) = task.predict(folder, [["three four"]])
    tok = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    logits = model(**tok("three four", return_tensors="pt")).logits.softmax(-1)[0].tolist()
    assert np.allclose(list(answer["scores"].values()), logits, atol=1e-5), name


def test_rows_shorter_than_the_special_tokens_have_types() -> None:
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert TokenTypes(1, (3,), (0, 2)).padded(mask).tolist() == [[3, 1, 0, 2], [3, 0, 0, 0], [3, 0, 0, 0], [0] * 4]
