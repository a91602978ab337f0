# ruff: noqa: E501
"""Scripts that `lockstep init --from` carries, for `carried_scripts.py`, and their tiny models and data."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

ROWS = 16
WORDS = [
    "good",
    "bad",
    "fine",
    "poor",
    "great",
    "awful",
    "film",
    "book",
    "song",
    "the",
    "a",
    "was",
    "very",
    "not",
    "so",
    "it",
    "and",
    "but",
]


@dataclass(frozen=True)
class Case:
    """A script and how to compare it. `whole`: each step has all examples. `said`: start of a difference -> what init
    says of it."""

    text: str
    file: str = "script.py"
    reference: str | None = None  # a script that does what a file of keys asks for
    arguments: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # for init
    train_words: tuple[str, ...] = ("data.validation=valid.jsonl",)
    whole: bool = True
    rows_per_example: int = 1
    step_sizes: tuple[int, ...] = ()
    needs: tuple[str, ...] = ()
    said: dict[str, str] = field(default_factory=dict)

    def sizes(self, folder: Path, steps: int) -> list[int]:
        if self.step_sizes:
            return list(self.step_sizes)
        return [ROWS] * steps


def write_inputs(folder: Path) -> None:
    """Write data and models: m (BERT, two labels), g (GPT-2), t (T5), each with its tokenizer."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    chosen = random.Random(0)
    texts = [" ".join(chosen.choices(WORDS, k=chosen.randint(3, 20))) for _ in range(2 * ROWS)]

    def write(name: str, rows: list[dict]) -> None:
        for split, part in (("train", rows[:ROWS]), ("valid", rows[ROWS:])):
            where = folder / (f"{split}.jsonl" if name == "rows" else f"{name}_{split}.jsonl")
            where.write_text("".join(json.dumps(each) + "\n" for each in part))

    write("rows", [{"text": text, "label": k % 2} for k, text in enumerate(texts)])
    write("texts", [{"text": text} for text in texts])
    write("scores", [{"text": text, "label": len(text) / 20} for text in texts])
    write("pairs", [{"prompt": t, "chosen": " good film", "rejected": " bad awful book"} for t in texts])
    write("answers", [{"prompt": t, "completion": f" {t.split()[0]} film"} for t in texts])
    write(
        "alpaca",
        [{"instruction": t, "input": "" if k % 2 else "a film", "output": "good"} for k, t in enumerate(texts)],
    )
    write("plain_alpaca", [{"instruction": t, "output": f"{t.split()[0]} film"} for t in texts])
    chats = [[{"role": "user", "content": t}, {"role": "assistant", "content": t.split()[0]}] for t in texts]
    write("chats", [{"messages": chat} for chat in chats])
    write("tags", [{"tokens": t.split(), "ner_tags": [len(w) % 3 for w in t.split()]} for t in texts])
    write("turned", [{"source": t, "target": " ".join(reversed(t.split()))} for t in texts])
    folder.joinpath("corpus.txt").write_text("\n".join(texts))
    _write_models(folder, torch, hf, Tokenizer, models, pre_tokenizers)


def _write_models(folder: Path, torch, hf, Tokenizer, models, pre_tokenizers) -> None:  # type: ignore[no-untyped-def]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<eos>", "<|user|>", "<|assistant|>", *WORDS]
    words += ["###", "Instruction:", "Input:", "Response:", "instruction", "Below", "is", "an", "that"]
    built = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", eos_token="<eos>", model_max_length=128,
    )  # fmt: skip
    size = len(tokenizer)
    torch.manual_seed(0)
    bert = hf.BertConfig(
        vocab_size=size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    gpt = hf.GPT2Config(
        vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=128, eos_token_id=5, bos_token_id=5,
        pad_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.2,
    )  # fmt: skip
    t5 = hf.T5Config(
        vocab_size=size, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0, pad_token_id=0,
        eos_token_id=5, decoder_start_token_id=0,
    )  # fmt: skip
    tokenizer.save_pretrained(folder / "t")
    hf.T5ForConditionalGeneration(t5).save_pretrained(folder / "t")
    for name, labels in (("m", 2), ("r", 1), ("n", 3)):
        bert.num_labels = labels
        kind = hf.BertForTokenClassification if name == "n" else hf.BertForSequenceClassification
        tokenizer.save_pretrained(folder / name)
        kind(bert).save_pretrained(folder / name)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|> ' + m['content'] + ' <eos> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder / "g")
    hf.GPT2LMHeadModel(gpt).save_pretrained(folder / "g")


CASES: dict[str, Case] = {}


def all_by(text: str) -> dict[str, str]:
    """Losses and weights that differ by what init says in these words."""
    return dict.fromkeys(("first loss", "loss", "weights"), text)


BIASES = {"weights": "decays biases and norms", "loss": "decays biases and norms"}

LOOP = """import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained("m")
data = load_dataset("json", data_files="train.jsonl", split="train")
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=32), batched=True, remove_columns=["text"])
data = data.rename_column("label", "labels")
loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))
model = AutoModelForSequenceClassification.from_pretrained("m", num_labels=2)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for epoch in range(4):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
STEP = "        optimizer.step()\n        optimizer.zero_grad()\n"


def changed(text: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


CASES["loop"] = Case(LOOP)
CASES["loop_decay"] = Case(changed(LOOP, ("weight_decay=0.0", "weight_decay=0.5")), said=BIASES)
CASES["loop_sgd"] = Case(
    changed(
        LOOP,
        (
            "AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)",
            "SGD(model.parameters(), lr=0.1, momentum=0.9)",
        ),
    )
)
CASES["loop_adam"] = Case(
    changed(
        LOOP,
        (
            "AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)",
            "Adam(model.parameters(), lr=1e-3, betas=(0.8, 0.95), eps=1e-6)",
        ),
    )
)
CASES["loop_modulo"] = Case(changed(
    LOOP, ("batch_size=16", "batch_size=4"), ("for batch in loader", "for i, batch in enumerate(loader)"), (".loss\n", ".loss / 4\n"),
    (STEP, "        if (i + 1) % 4 == 0:\n            optimizer.step()\n            optimizer.zero_grad()\n"),
))  # fmt: skip
CASES["loop_counter"] = Case(changed(
    LOOP, ("batch_size=16", "batch_size=4"), ("for epoch in", "n = 0\nfor epoch in"), (".loss\n", ".loss / 4\n"),
    (STEP, "        n += 1\n        if n % 4 == 0:\n            optimizer.step()\n            optimizer.zero_grad()\n"),
))  # fmt: skip
CASES["loop_linear_clip"] = Case(changed(
    LOOP, ("DataCollatorWithPadding\n", "DataCollatorWithPadding, get_linear_schedule_with_warmup\n"),
    ("for epoch in", "schedule = get_linear_schedule_with_warmup(optimizer, 2, 4 * len(loader))\nfor epoch in"),
    (STEP, "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n        optimizer.step()\n        "
           "schedule.step()\n        optimizer.zero_grad()\n"),
))  # fmt: skip
CASES["loop_get_scheduler"] = Case(changed(
    LOOP, ("DataCollatorWithPadding\n", "DataCollatorWithPadding, get_scheduler\n"), ("range(4)", "range(epochs)"),
    ("model.train()", "epochs = 5\nmodel.train()"),
    ("for epoch in", "total = epochs * len(loader)\nschedule = get_scheduler('cosine', optimizer, "
                     "num_warmup_steps=1, num_training_steps=total)\nfor epoch in"),
    (STEP, "        optimizer.step()\n        schedule.step()\n        optimizer.zero_grad()\n"),
))  # fmt: skip
CASES["loop_last_batch"] = Case(changed(LOOP, ("batch_size=16", "batch_size=6")), whole=False, step_sizes=(6, 6, 4) * 4)
CASES["loop_regression"] = Case(changed(
    LOOP, ("train.jsonl", "scores_train.jsonl"), ('"m"', '"r"'), ("num_labels=2", "num_labels=1"),
), train_words=("data.validation=scores_valid.jsonl",))  # fmt: skip
CASES["loop_bf16"] = Case(changed(LOOP, (
    "        loss = model(**batch).loss\n", '        with torch.autocast("cpu", dtype=torch.bfloat16):\n            '
                                            'loss = model(**batch).loss\n',
)), whole=False)  # fmt: skip
ACCELERATE = changed(
    LOOP, ("import torch\n", "import torch\nfrom accelerate import Accelerator\n"), ("batch_size=16", "batch_size=4"),
    ("for epoch in", "accelerator = Accelerator(gradient_accumulation_steps=4)\nmodel, optimizer, loader = "
                     "accelerator.prepare(model, optimizer, loader)\nfor epoch in"),
    ("        loss = model(**batch).loss\n        loss.backward()\n" + STEP,
     "        with accelerator.accumulate(model):\n            loss = model(**batch).loss\n            "
     "accelerator.backward(loss)\n            if accelerator.sync_gradients:\n                "
     "accelerator.clip_grad_norm_(model.parameters(), 0.05)\n            optimizer.step()\n            "
     "optimizer.zero_grad()\n"),
)  # fmt: skip
CASES["accelerate"] = Case(ACCELERATE, needs=("accelerate",))
SCHEDULED = changed(
    ACCELERATE, ("import Accelerator\n", "import Accelerator\nfrom transformers import "
                                         "get_linear_schedule_with_warmup\n"),
    ("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
     "total = 4 * len(loader) // 4\nschedule = get_linear_schedule_with_warmup(optimizer, int(0.5 * total), "
     "total)\nmodel, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)"),
    ("            optimizer.step()\n", "            optimizer.step()\n            schedule.step()\n"),
)  # fmt: skip
CASES["accelerate_schedule"] = Case(SCHEDULED, needs=("accelerate",))
TRAINER = (
    LOOP[: LOOP.index("loader = ")]
    .replace("from torch.utils.data import DataLoader\n", "")
    .replace("DataCollatorWithPadding", "Trainer, TrainingArguments")
    + """model = AutoModelForSequenceClassification.from_pretrained("m", num_labels=2)
arguments = TrainingArguments("out", per_device_train_batch_size=16, num_train_epochs=4, learning_rate=1e-3, use_cpu=True, report_to="none")
trainer = Trainer(model, arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
"""
)
CASES["trainer"] = Case(TRAINER)
CASES["trainer_many"] = Case(changed(TRAINER, (
    "size=16", "size=4, gradient_accumulation_steps=4, warmup_steps=2, label_smoothing_factor=0.1, "
               "weight_decay=0.5, adam_beta2=0.95, max_grad_norm=0.1, lr_scheduler_type='cosine'",
)))  # fmt: skip
CASES["trainer_ratio"] = Case(changed(TRAINER, ("size=16", "size=16, warmup_steps=0.3"), ("epochs=4", "epochs=7")))
CASES["trainer_accumulated"] = Case(
    changed(TRAINER, ("size=16", "size=4, gradient_accumulation_steps=4, max_grad_norm=0, optim='sgd'")),
    said=all_by("adds up the gradients"),
)
CASES["trainer_left_over"] = Case(
    changed(TRAINER, ("size=16", "size=3, gradient_accumulation_steps=2")), whole=False, step_sizes=(6, 6, 4) * 4
)
CASES["trainer_sgd"] = Case(
    changed(TRAINER, ("size=16", "size=16, optim='sgd', lr_scheduler_type='constant_with_warmup', warmup_steps=2"))
)
CASES["trainer_regression"] = Case(
    changed(TRAINER, ("train.jsonl", "scores_train.jsonl"), ('"m"', '"r"'), ("num_labels=2", "num_labels=1")),
    train_words=("data.validation=scores_valid.jsonl",),
)
LM = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("g")
data = load_dataset("json", data_files="texts_train.jsonl", split="train")
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=32), batched=True, remove_columns=["text"])
model = AutoModelForCausalLM.from_pretrained("g")
arguments = TrainingArguments("out", per_device_train_batch_size=4, gradient_accumulation_steps=4, num_train_epochs=4, learning_rate=1e-3, weight_decay=0.3, use_cpu=True, report_to="none")
Trainer(model, arguments, train_dataset=data, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)).train()
"""
CASES["trainer_lm"] = Case(
    LM, train_words=("data.validation=texts_valid.jsonl",), said=all_by("a text ends with <eos>")
)
LOOP_LM = """import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

tokenizer = AutoTokenizer.from_pretrained("g")
data = load_dataset("json", data_files="texts_train.jsonl", split="train")
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=32), batched=True, remove_columns=["text"])
loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
model = AutoModelForCausalLM.from_pretrained("g")
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for epoch in range(4):
    for i, batch in enumerate(loader):
        loss = model(**batch).loss / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
CASES["loop_lm"] = Case(
    LOOP_LM, train_words=("data.validation=texts_valid.jsonl",), said=all_by("a text ends with <eos>")
)
CASES["loop_lm_whole"] = Case(
    changed(
        LOOP_LM,
        ("batch_size=4", "batch_size=16"),
        (" / 4", ""),
        ("        if (i + 1) % 4 == 0:\n            optimizer.step()\n            optimizer.zero_grad()\n", STEP),
    ),
    train_words=("data.validation=texts_valid.jsonl",),
    said=all_by("a text ends with <eos>"),
)
SEQ = """from datasets import load_dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

tokenizer = AutoTokenizer.from_pretrained("t")
model = AutoModelForSeq2SeqLM.from_pretrained("t")
data = load_dataset("json", data_files="turned_train.jsonl", split="train")


def prepare(rows):
    made = tokenizer(rows["source"], max_length=32, truncation=True)
    made["labels"] = tokenizer(text_target=rows["target"], max_length=32, truncation=True)["input_ids"]
    return made


data = data.map(prepare, batched=True, remove_columns=["source", "target"])
arguments = Seq2SeqTrainingArguments("out", per_device_train_batch_size=8, gradient_accumulation_steps=2, num_train_epochs=4, learning_rate=1e-3, use_cpu=True, report_to="none")
Seq2SeqTrainer(model, arguments, train_dataset=data, data_collator=DataCollatorForSeq2Seq(tokenizer, model=model)).train()
"""
CASES["trainer_seq2seq"] = Case(
    SEQ, train_words=("data.validation=turned_valid.jsonl",), said=all_by("adds up the gradients")
)
TAGS = """from datasets import load_dataset
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("n")
data = load_dataset("json", data_files="tags_train.jsonl", split="train")


def tokenize_and_align_labels(rows):
    made = tokenizer(rows["tokens"], truncation=True, is_split_into_words=True, max_length=32)
    labels = []
    for i, label in enumerate(rows["ner_tags"]):
        word_ids = made.word_ids(batch_index=i)
        previous, ids = None, []
        for word in word_ids:
            if word is None:
                ids.append(-100)
            elif word != previous:
                ids.append(label[word])
            else:
                ids.append(-100)
            previous = word
        labels.append(ids)
    made["labels"] = labels
    return made


data = data.map(tokenize_and_align_labels, batched=True, remove_columns=["tokens", "ner_tags"])
model = AutoModelForTokenClassification.from_pretrained("n", num_labels=3)
arguments = TrainingArguments("out", per_device_train_batch_size=8, gradient_accumulation_steps=2, num_train_epochs=4, learning_rate=1e-3, weight_decay=0.1, use_cpu=True, report_to="none")
Trainer(model=model, args=arguments, train_dataset=data, data_collator=DataCollatorForTokenClassification(tokenizer)).train()
"""
CASES["trainer_tags"] = Case(
    TAGS, train_words=("data.validation=tags_valid.jsonl",), said=all_by("adds up the gradients")
)

SFT = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

data = load_dataset("json", data_files="texts_train.jsonl", split="train")
arguments = SFTConfig("out", per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-3, num_train_epochs=4, max_length=64, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none")
trainer = SFTTrainer(model=AutoModelForCausalLM.from_pretrained("g"), args=arguments, train_dataset=data, processing_class=AutoTokenizer.from_pretrained("g"))
trainer.train()
"""
CASES["sft_text"] = Case(
    SFT, needs=("trl",), train_words=("data.validation=texts_valid.jsonl",), said=all_by("divides the loss")
)
CASES["sft_answers"] = Case(
    SFT.replace("texts_train", "answers_train"), needs=("trl",), train_words=("data.validation=answers_valid.jsonl",)
)
DPO = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

data = load_dataset("json", data_files="pairs_train.jsonl", split="train")
arguments = DPOConfig("out", beta=0.3, per_device_train_batch_size=8, gradient_accumulation_steps=2, num_train_epochs=4, learning_rate=1e-3, max_length=64, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none")
DPOTrainer("g", args=arguments, train_dataset=data, processing_class=AutoTokenizer.from_pretrained("g")).train()
"""
CASES["dpo"] = Case(DPO, needs=("trl",), rows_per_example=2, train_words=("data.validation=pairs_valid.jsonl",))
CASES["dpo_ipo"] = Case(
    DPO.replace("beta=0.3", 'beta=0.3, loss_type="ipo"'),
    needs=("trl",),
    rows_per_example=2,
    train_words=("data.validation=pairs_valid.jsonl",),
)
POINTS = """import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)


class Points(Dataset):
    def __init__(self, count=1000):
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(7))
        self.y = (self.x.sum(-1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main():
    torch.manual_seed(0)
    model = Net(8)
    data = Points(16)
    loader = DataLoader(data, batch_size=5, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
"""
CASES["own_module"] = Case(
    POINTS, whole=False, step_sizes=(5, 5, 5, 1) * 4, train_words=(), said={"steps": "a tenth of train is held out"}
)
CASES["loop_cut"] = Case(changed(LOOP, ("max_length=32", "max_length=6")))
CASES["loop_lm_cut"] = Case(
    changed(
        LOOP_LM,
        ("batch_size=4", "batch_size=16"),
        (" / 4", ""),
        ("max_length=32", "max_length=6"),
        ("        if (i + 1) % 4 == 0:\n            optimizer.step()\n            optimizer.zero_grad()\n", STEP),
    ),
    train_words=("data.validation=texts_valid.jsonl",),
    said={**all_by("a text ends with <eos>"), "steps": "lockstep trains on the rest as further examples"},
)
PLAIN = 'plain = ["bias", "LayerNorm.weight", "embeddings.word"]\ngroups = [\n'
PLAIN += (
    '    {"params": [p for n, p in model.named_parameters() if not any(w in n for w in plain)], "weight_decay": 0.5},\n'
)
PLAIN += (
    '    {"params": [p for n, p in model.named_parameters() if any(w in n for w in plain)], "weight_decay": 0.0},\n]\n'
)
CASES["loop_groups"] = Case(
    changed(
        LOOP,
        ("optimizer =", PLAIN + "optimizer ="),
        ("AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)", "AdamW(groups, lr=1e-3)"),
    )
)
CASES["loop_padding_lambda"] = Case(
    changed(
        LOOP,
        (
            "collate_fn=DataCollatorWithPadding(tokenizer)",
            'collate_fn=lambda rows: tokenizer.pad(rows, return_tensors="pt")',
        ),
    )
)
