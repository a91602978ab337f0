"""`lockstep init --from`: names are those of the libraries, values those of one branch, modes those of one place."""

from pathlib import Path

import pytest

from lockstep.lab.import_config import import_config
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft
from support.moving_scripts import ACCELERATE, LOOP, MODE, SCRIPT, changed
from support.trainer_variants import CALLBACKS, COLLATOR, METRICS, SETS, TRAINED, TUNED

TORCH = "import torch\n" + TRAINED
TRAINER = "EarlyStoppingCallback, Trainer, TrainingArguments"
WITHOUT = "EarlyStoppingCallback, TrainingArguments"
LOADER = "from torch.utils.data import DataLoader\n"
NOT_OF_A_LIBRARY = (  # script, what is changed, the name that is refused
    (TRAINED, (TRAINER, WITHOUT), "Trainer"),
    (TRAINED, (TRAINER, "EarlyStoppingCallback, Trainer"), "TrainingArguments"),
    (TRAINED, ("import EarlyStoppingCallback, ", "import "), "EarlyStoppingCallback"),
    (TRAINED, ("from datasets import load_dataset\n", ""), "load_dataset"),
    (TRAINED, ("trainer = Trainer(", "trainer = tools.Trainer("), "tools"),
    (TRAINED, (TRAINER, f"{WITHOUT}\nfrom numpy import *"), "Trainer"),
    (TRAINED, (TRAINER, f"{WITHOUT}\nfrom trl import *\nfrom transformers import *"), "Trainer"),
    (TRAINED, (TRAINER, f"{WITHOUT}\nfrom optimum.onnxruntime import ORTTrainer as Trainer"), "optimum.onnx"),
    (TRAINED, (TRAINER, f"{WITHOUT}\nfrom trl import IterativeSFTTrainer as Trainer"), "trl.IterativeSFTTrainer"),
    (TRAINED, (TRAINER, f"{WITHOUT}\nfrom pathlib import Path as Trainer"), "trainer.train()"),
    (TUNED, ("LoraConfig, prepare", "prepare"), "LoraConfig"),
    (SCRIPT, (LOADER, ""), "DataLoader"),
    (SCRIPT, (LOADER, "from timm.data import DataLoader\n"), "timm.data.DataLoader"),
    (SCRIPT, ("torch.optim.AdamW", "optim.AdamW"), "optim"),
    (SCRIPT, ("import torch\n", ""), "torch"),
    (ACCELERATE, ("from accelerate import Accelerator\n", ""), "Accelerator"),
)
OF_A_LIBRARY = (
    (TRAINED, (TRAINER, f"{WITHOUT}\nfrom transformers import Trainer as T"), ("trainer = Trainer(", "trainer = T(")),
    (TRAINED, (TRAINER, f"{WITHOUT}\nimport transformers as hf"), ("trainer = Trainer(", "trainer = hf.Trainer(")),
    (TRAINED, (TRAINER, f"{WITHOUT}\nfrom transformers import *")),
    (SCRIPT, (LOADER, "import torch.utils.data as data_of\n"), *[("= DataLoader(", "= data_of.DataLoader(")] * 2),
)
IF = "import os\nif os.environ.get('BIG'):\n"
ROWS = ('train_dataset=data["train"]', "train_dataset=rows")
LOADED = "AutoModelForSequenceClassification.from_pretrained('acme/big', num_labels=5)"
OF_SEVERAL_VALUES = (  # script, what is changed, the name
    (TORCH, (SETS, f"{IF}    rows = data['validation']\nelse:\n    rows = data['train']\n{SETS}"), ROWS, "rows"),
    (TORCH, (SETS, f"try:\n    rows = data['dev']\nexcept KeyError:\n    rows = data['train']\n{SETS}"), ROWS, "rows"),
    (
        TORCH,
        (
            SETS,
            "match len(data):\n    case 1:\n        rows = data['dev']\n    case _:\n        rows = data['train']\n"
            f"{SETS}",
        ),
        ROWS,
        "rows",
    ),
    (
        TORCH,
        (
            SETS,
            "for name in data:\n    if name == 'dev':\n        rows = data[name]\n        continue\n"
            f"    rows = data['train']\n{SETS}",
        ),
        ROWS,
        "rows",
    ),
    (TORCH, (SETS, f"if torch.cuda.is_available():\n    model = {LOADED}\n{SETS}"), "model"),
    (
        TORCH,
        (SETS, f"collate = DataCollatorWithPadding(tokenizer)\n{IF}    collate = None\n{SETS}"),
        (COLLATOR, "data_collator=collate"),
        "collate",
    ),
    (
        TORCH,
        (METRICS, f"stop = EarlyStoppingCallback(3)\n{IF}    stop = None\n{METRICS}"),
        (CALLBACKS, "callbacks=[stop]"),
        "stop",
    ),
    (ACCELERATE, ("schedule = get", f"{IF}    schedule = None\nelse:\n    schedule = get"), "schedule"),
    (SCRIPT, (LOOP, f"{IF}    train = dev\n{LOOP}"), "train"),
)
OF_ONE_VALUE = (
    (TORCH, (SETS, f"{IF}    rows = data['train']\nelse:\n    rows = data['train']\n{SETS}"), ROWS),
    (TORCH, (SETS, f"rows = None\nif rows is None:\n    rows = data['train']\n{SETS}"), ROWS),
    (TORCH, (SETS, f"if len(data) > 9:\n    rows = None\n    raise SystemExit\nrows = data['train']\n{SETS}"), ROWS),
    (TORCH, (SETS, f"if torch.cuda.is_available():\n    model = model.cuda()\n{SETS}")),
    (
        TORCH,
        (SETS, f"rows = None\n{IF}    rows = data['validation']\n{SETS}"),
        ('eval_dataset=data["validation"]', "eval_dataset=rows"),
    ),
    (SCRIPT, (LOOP, f"name = 'a'\n{IF}    name = 'b'\nprint(name)\n{LOOP}")),
)
MODES = (
    "parts = [model]\n    parts[0].eval()",
    "parts = {'m': model}\n    parts['m'].eval()",
    "list(map(lambda m: m.eval(), [model]))",
)
OWN = """
import torch
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def helper(part):
    part.eval()
    return part


class Tagger(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch, index):
        return self.loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-5)


rows = TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
tagger = Tagger()
trainer = L.Trainer(max_epochs=5)
trainer.fit(tagger, DataLoader(rows, batch_size=16, shuffle=True))
"""
LOSS, STEP, LEARNS = (
    "        self.loss = nn",
    "    def training_step",
    "        return self.loss(self.net(batch[0]), batch[1])",
)
MAKE, FIT = "        return torch.optim.AdamW", "trainer = L.Trainer"
SETS_MODES = (
    (LOSS, f"        helper(self.net)\n{LOSS}"),
    (LOSS, f"        self.net = helper(self.net)\n{LOSS}"),
    (LOSS, f"        h = helper\n        h(self)\n{LOSS}"),
    (MAKE, f"        helper(self.net)\n{MAKE}"),
    (STEP, f"    def on_train_start(self):\n        helper(self)\n\n{STEP}"),
    (LEARNS, f"        self.net.eval()\n{LEARNS}"),
    (LEARNS, f"        self.freeze()\n{LEARNS}"),
    (LEARNS, f"        self.net[0].weight.data.mul_(0.9)\n{LEARNS}"),
    (FIT, f"helper(tagger)\n{FIT}"),
    (FIT, f"parts = [tagger]\nparts[0].net.eval()\n{FIT}"),
)
SETS_NO_MODE = (
    ("        self.log(", "        helper(self.net)\n        self.log("),  # Lightning restores the modes
    ("shuffle=True))\n", "shuffle=True))\nhelper(tagger)\n"),
    (LEARNS, f'        self.log("x", batch[0].mean())\n{LEARNS}'),
    ("    part.eval()\n", "    other = nn.Linear(2, 2)\n    other.eval()\n"),
)


def _deciding(text: str) -> list[str]:
    draft = RunDraft(by_hand={"data.max_length": 64})
    import_config.script(Script(Path("train.py"), text)).move(draft, 1)
    for each in draft.at_end:
        each(draft)
    return list(map(str, draft.deciding()))


@pytest.mark.parametrize("case", NOT_OF_A_LIBRARY)
def test_names_without_an_import_belong_to_no_library(case: tuple[str, tuple[str, str], str]) -> None:
    text, pair, name = case
    lines = _deciding(changed(pair, text=text))
    assert any(f": {name}" in line and line.startswith("not understood: line ") for line in lines), lines


@pytest.mark.parametrize("case", OF_A_LIBRARY)
def test_library_names_may_be_imported_in_any_way(case: tuple[str, tuple[str, str]]) -> None:
    text, *pairs = case
    assert not _deciding(changed(*pairs, text=text))


@pytest.mark.parametrize("case", OF_SEVERAL_VALUES)
def test_names_assigned_in_one_of_two_branches_are_refused(case: tuple[str, ...]) -> None:
    text, *pairs, name = case
    lines = _deciding(changed(*pairs, text=text))  # type: ignore[arg-type]
    assert any(f": {name} (it has the value of line" in line for line in lines), lines


@pytest.mark.parametrize("case", OF_ONE_VALUE)
def test_names_with_equal_values_in_all_branches_are_followed(case: tuple[str, tuple[str, str]]) -> None:
    text, *pairs = case
    assert not any("it has the value of line" in line for line in _deciding(changed(*pairs, text=text)))


@pytest.mark.parametrize("code", MODES)
def test_modes_set_through_containers_or_lambdas_are_refused(code: str) -> None:
    assert any("eval()" in line for line in _deciding(changed((MODE, f"{MODE}    {code}\n"))))


def test_modes_of_a_module_with_its_own_loss_are_set_nowhere_else() -> None:
    usual = _deciding(OWN)
    for pair in SETS_MODES:
        assert len(_deciding(changed(pair, text=OWN))) > len(usual), pair
    for pair in SETS_NO_MODE:
        assert len(_deciding(changed(pair, text=OWN))) == len(usual), (pair, _deciding(changed(pair, text=OWN)))


def test_a_weight_that_is_changed_in_place_by_its_name_is_refused() -> None:
    for code in (
        "with torch.no_grad():\n    for p in model.parameters():\n        p *= 2",
        "with torch.no_grad():\n    for name, p in model.named_parameters():\n        p += 1",
        "w = model.classifier.weight\nwith torch.no_grad():\n    w -= 1",
    ):
        assert _deciding(changed((LOOP, f"{code}\n{LOOP}"))), code
    count = "total = 0\nfor p in model.parameters():\n    total += p.numel()\nprint(total)"
    assert not _deciding(changed((LOOP, f"{count}\n{LOOP}")))
