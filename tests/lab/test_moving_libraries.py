"""`lockstep init --from` of scripts that meet surprises of libraries, each of which tests/assumptions has by itself.

A script that would train something else in lockstep is refused at its line."""

from pathlib import Path

import pytest

from support.moving_scripts import ACCELERATE, TRAINER, USUAL, moved, refused

LM = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening

tokenizer = AutoTokenizer.from_pretrained("acme/gpt")
data = load_dataset("acme/notes")

def tokenize(rows):
    return tokenizer(rows["text"], truncation=True, max_length=128)

data = data.map(tokenize, batched=True, remove_columns=["text"])
model = AutoModelForCausalLM.from_pretrained("acme/gpt")
args = TrainingArguments(output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2)
Trainer(model=model, args=args, train_dataset=data["train"], data_collator=COLLATOR).train()
"""
SWALLOWS = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels=None, **kwargs):
        out = self.layer(x)[:, 0]
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


rows = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(64)]
args = TrainingArguments(output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2)
Trainer(model=Net(), args=args, train_dataset=rows).train()
"""
STATE = "from torch.distributed.checkpoint.state_dict import get_state_dict\n"
VOCABULARY = """from tokenizers import Tokenizer, models, trainers
from transformers import PreTrainedTokenizerFast
raw = load_dataset("acme/pairs")
made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
made.train_from_iterator(raw["train"]["first"], trainers.WordPieceTrainer(vocab_size=500))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
"""
LORA = "from peft import LoraConfig, get_peft_model\n"
LORA += 'model = get_peft_model(model, LoraConfig(r=4, task_type="SEQ_CLS"))\n'


def _changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


STEP = "            optimizer.step()\n"
FIRST = "model.train()\n"
EVALUATION = """
    model.eval()
    right, count = 0, 0
    for batch in dev:
        with torch.no_grad():
            logits = model(**batch).logits
        predicted, labels = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
        right += (predicted == labels).sum().item()
        count += len(labels)
    print(right / count)
    model.train()
"""
DISPATCH = _changed(
    ACCELERATE,
    ("Accelerator(gradient", "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False), gradient"),
    ("import torch\n", "import torch\nfrom accelerate.utils import DataLoaderConfiguration\n"),
)
STREAM = _changed(
    DISPATCH,
    ('load_dataset("acme/pairs")', 'load_dataset("acme/pairs", streaming=True)'),
    (", shuffle=True", ""),
    ("len(train) * 3 // 4", "300"),
)
FULLY_SHARD = "from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n"
REFUSED = {
    "packed rows": (LM.replace("COLLATOR", "DataCollatorWithFlattening()"), "DataCollatorWithFlattening()"),
    "a stream whose repeats are gathered": (STREAM + EVALUATION, "dispatch_batches=False"),
    "rows that are not dispatched": (DISPATCH + EVALUATION, "dispatch_batches=False"),
    "an optimizer's state that is made by a save": (
        _changed(ACCELERATE, (FIRST, f"{STATE}saved = get_state_dict(model, optimizer)\n{FIRST}")),
        "get_state_dict(model, optimizer)",
    ),
    "a forward that swallows num_items_in_batch": (SWALLOWS, "model=Net()"),
    "a vocabulary that is trained in the script": (
        _changed(
            ACCELERATE,
            (
                'tokenizer = AutoTokenizer.from_pretrained("acme/encoder")\nraw = load_dataset("acme/pairs")\n',
                VOCABULARY,
            ),
        ),
        "vocab_size=500",
    ),
    "an adapter that is merged and unmerged": (
        _changed(ACCELERATE, (FIRST, LORA + FIRST)) + "    model.merge_adapter()\n    model.unmerge_adapter()\n",
        "model.unmerge_adapter()",
    ),
    "a training after a merge": (
        _changed(
            TRAINER.replace("ARGUMENTS", USUAL),
            ("def compute_metrics", f"{LORA}\ndef compute_metrics"),
            ("trainer.train()\n", "trainer.train()\nmodel.merge_adapter()\ntrainer.train()\n"),
        ),
        "model.merge_adapter()",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_surprise_of_a_library_is_refused_at_its_line(
    case: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, part = REFUSED[case]
    name = part.partition("(")[0]
    number = next(n for n, line in enumerate(text.splitlines(), 1) if name in line and "import" not in line)
    said = refused("train.py", text, capsys)
    assert any(f"line {number}: " in line and part in line for line in said.splitlines() if "read:" not in line), said


def test_equivalent_library_calls_are_read(here: Path) -> None:
    """Trainer counts targets as lockstep does; the script prints the norm that clipping returns, without using it."""
    collator = "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
    assert moved("train.py", LM.replace("COLLATOR", collator)).task.name == "language_modeling"
    clipped = "            if accelerator.sync_gradients:\n"
    clipped += "                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)\n"
    clipped += "                print(float(norm))\n"
    for sharded in ("", FULLY_SHARD):
        text = _changed(ACCELERATE, (STEP, clipped + STEP), ("optimizer = torch", f"{sharded}optimizer = torch"))
        run = moved("train.py", text)
        assert run.optim.max_grad_norm == 0.5
        assert (run.strategy.name == "fsdp2") is bool(sharded)
    assert moved("train.py", ACCELERATE + EVALUATION).task.name == "classification"
