"""`lockstep init --from`: which tokens of a script are labeled: padding, tagged words, answers, masked tokens."""

from pathlib import Path

import pytest
from transformers import BertConfig, BertForQuestionAnswering, BertForTokenClassification

from lockstep.lab.import_config import loss_means
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft
from support.moving_scripts import QUESTIONS, TAGS, changed, moved, refused

ARGUMENTS = 'args = TrainingArguments("out", per_device_train_batch_size=4)\n'
USED = """
from datasets import load_dataset
from transformers import AutoModelForCLASS, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

data = load_dataset("acme/rows")
tokenizer = AutoTokenizer.from_pretrained("acme/model")
model = AutoModelForCLASS.from_pretrained("acme/model")

FUNCTION
data = data.map(tokens, batched=True)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=MLM)
args = TrainingArguments("out", per_device_train_batch_size=4)
Trainer(model=model, args=args, train_dataset=data["train"], data_collator=collator).train()
"""

CAUSAL = """
def tokens(rows):
    out = tokenizer(rows["text"], truncation=True, max_length=32, padding="max_length")
    out["labels"] = out["input_ids"].copy()
    return out
"""
SEQUENCES = """
def tokens(rows):
    out = tokenizer(rows["document"], truncation=True, max_length=32)
    out["labels"] = tokenizer(text_target=rows["summary"], truncation=True, max_length=8, padding="max_length")[
        "input_ids"
    ]
    return out
"""
MASKED = """
def tokens(rows):
    rows["text"] = [line for line in rows["text"] if len(line) > 0 and not line.isspace()]
    return tokenizer(rows["text"], truncation=True, max_length=32)
"""


def not_moved(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    Path("moved.yaml").unlink(missing_ok=True)
    return refused("other.py", text, capsys)


def script(function: str, kind: str, *pairs: tuple[str, str]) -> str:
    text = USED.replace("FUNCTION", function).replace("CLASS", kind).replace("MLM", str(kind == "MaskedLM"))
    if kind != "MaskedLM":
        text = text.replace(", data_collator=collator", "").replace(
            "collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)\n", ""
        )
    return changed(*pairs, text=text)


def test_tags_of_words(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = script(TAGS, "TokenClassification")
    same = "if word is None or word == previous:\n                row.append(-100)\n            elif True:"
    for pairs in (
        (),
        (("[tags[word]]", "[int(tags[word])]"),),
        (("if word is None:\n                row.append(-100)\n            elif word != previous:", same),),
        (
            (
                "row.append(-100)\n            previous",
                "row.append(ids[tags[word]] if False else -100)\n            previous",
            ),
        ),
        (('{label: i for i, label in enumerate(["O", "B", "I"])}', "{i: i for i in range(3)}"),),
    ):
        assert moved("train.py", changed(*pairs, text=usual)).task.name == "token_classification"
    for pair in (
        ("word is None:", 'word is None or tags[word] == "O":'),
        ("elif word != previous", "elif word == previous"),
        ("tags[word]", "tags[0]"),
        ("previous = word", "previous = None"),
        ("{label: i for", "{label: i // 2 for"),
        ('{label: i for i, label in enumerate(["O", "B", "I"])}', '{"O": 0, "B": 1, "I": 1}'),
    ):
        assert "first token of a word has its tag" in not_moved(changed(pair, text=usual), capsys)


def test_padding_that_is_learned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    causal, pairs = script(CAUSAL, "CausalLM"), script(SEQUENCES, "Seq2SeqLM")
    for text in (causal, pairs):
        assert "the script learns padding" in not_moved(text, capsys)
    unpadded = changed((', padding="max_length"', ""), text=pairs)
    masks = "    out['labels'] = [[-100 if t == tokenizer.pad_token_id else t for t in row] for row in out['labels']]\n"
    masked = changed(("    return out", f"{masks}    return out"), text=pairs)
    maybe = masks.replace("    out", "    if len(out):\n        out", 1)
    for text in (unpadded, masked, changed(("    return out", f"{maybe}    return out"), text=pairs)):
        assert moved("train.py", text).task.name in ("translation", "summarization")
    remade = USED.replace("FUNCTION", CAUSAL).replace("CLASS", "CausalLM").replace("MLM", "False")
    assert moved("train.py", remade).task.name == "language_modeling"  # the collator makes labels without padding


def test_masked_tokens(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(MASKED, "MaskedLM")
    assert moved("train.py", text).data.drop_missing is True
    assert "truncates texts longer than data.max_length" in capsys.readouterr().out
    for pair in (
        (" and not line.isspace()", ""),
        ("[line for", "[line.lower() for"),
        ("len(line) > 0", "len(line) > 9"),
    ):
        assert "changes the rows" in not_moved(changed(pair, text=text), capsys)
    assert "mlm=False" in not_moved(text.replace("mlm=True", "mlm=False"), capsys)


def test_padding_among_the_positions_of_an_answer(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved("qa.py", QUESTIONS)
    assert "includes padding" in capsys.readouterr().out
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=6, max_position_embeddings=16, **sizes)
    for kind, task in ((BertForQuestionAnswering, "question_answering"), (BertForTokenClassification, "token")):
        monkeypatch.setattr(loss_means, "empty_model", lambda *_, kind=kind: kind(config))
        draft = RunDraft(keys={"task.name": task, "micro_batches": 4})
        loss_means.note_trainer(draft, Script(Path("train.py"), ""))
        assert bool(draft.notes) is (task == "token")  # Trainer counts the targets of `labels` alone


def test_sampling_order_and_reward_settings_are_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = changed(('"out", ', '"out", train_sampling_strategy="sequential", '), text=script(MASKED, "MaskedLM"))
    assert "train_sampling_strategy: sequential" in not_moved(text, capsys)
    assert moved("train.py", text.replace("sequential", "random")).data.group_by_length == 1
    reward = """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

model = AutoModelForSequenceClassification.from_pretrained("acme/reward", num_labels=1)
data = load_dataset("acme/pairs", split="train")
args = RewardConfig("out", max_length=64, disable_dropout=False)
RewardTrainer(model, args, train_dataset=data, processing_class=AutoTokenizer.from_pretrained("acme/reward")).train()
"""
    assert moved("reward.py", reward).task.name == "reward"
