"""`lockstep init --from`: data modules of Lightning, and methods and values of its classes, none of which is lost."""

from pathlib import Path

from lockstep.lab.import_config import import_config
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft
from support.moving_scripts import changed

SCRIPT = """
import torch
import pytorch_lightning as pl
from torch.utils.data import DataLoader
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

class Data(pl.LightningDataModule):
    def __init__(self, name="acme/encoder", batch_size=32):
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.batch_size = batch_size
    def setup(self, stage=None):
        rows = load_dataset("acme/reviews")
        self.rows = rows.map(lambda r: self.tokenizer(r["text"], truncation=True, max_length=64), batched=True)
    def train_dataloader(self):
        return DataLoader(self.rows["train"], batch_size=self.batch_size, shuffle=True)
    def val_dataloader(self):
        return DataLoader(self.rows["validation"], batch_size=self.batch_size)

class Net(pl.LightningModule):
    def __init__(self, name="acme/encoder", lr=2e-5):
        super().__init__()
        self.save_hyperparameters()
        self.rate = lr * 10
        self.model = AutoModelForSequenceClassification.from_pretrained(name)
        self.model.train()
    def training_step(self, batch, number):
        return self.model(**batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.rate)

data = Data(batch_size=16)
trainer = pl.Trainer(max_epochs=3, devices=[0, 1])
trainer.fit(Net(), datamodule=data)
"""
TRAIN, MAKE, LOSS = (
    "        self.model.train()\n",
    "        return torch.optim.AdamW",
    "        return self.model(**batch).loss",
)
FIT, STEP, OF_DATA = "trainer.fit(Net(), datamodule=data)", "    def training_step", "    def train_dataloader(self):\n"
LOGS = "    def validation_step(self, batch, number):\n"
LOGS += '        self.log("val_loss", self.model(**batch).loss)\n        self.log("val_acc", 1)\n'
LOST = {  # what is changed -> a part of the gap
    (OF_DATA, f'        self.rows["train"] = self.rows["train"].select(range(9))\n{OF_DATA}'): "data.limit is",
    (OF_DATA, f'        self.rows["train"] = self.rows["validation"]\n{OF_DATA}'): "self.rows['validation'] (",
    (OF_DATA, f"        self.train_dataloader = None\n{OF_DATA}"): "self.train_dataloader",
    (OF_DATA, f"        self.trainer.model.eval()\n{OF_DATA}"): "self.trainer.model",
    (OF_DATA, f"    def transfer_batch_to_device(self, b, d, i):\n        return b\n{OF_DATA}"): "transfer_batch",
    (OF_DATA, f"    def load_state_dict(self, s):\n        return b\n{OF_DATA}"): "Lightning calls it by its name",
    (OF_DATA, f"{OF_DATA}        if late:\n            return self.val_dataloader()\n"): "may train on several loaders",
    (FIT, "trainer.fit(Net(), data.val_dataloader())"): "the loop trains on the split 'validation'",
    (FIT, f"pl.tuner.Tuner(trainer).lr_find(Net())\n{FIT}"): "lr_find(Net())",
    (FIT, f"data.batch_size = n\n{FIT}"): "DataLoader(batch_size=self.batch_size)",
    (FIT, f"for i in range(3):\n    {FIT}"): "it trains several times",
    (FIT, f"if rank == 0:\n    {FIT}"): "it is called only if rank == 0",
    ("devices=[0, 1]", "devices=[0, 1], strategy=DDPStrategy(ddp_comm_hook=h)"): "strategy=DDPStrategy",
    ("max_epochs=3", "max_epochs=3, max_steps=50"): "training ends at the first of the two",
    (STEP, f"    def on_train_start(self):\n        self.model = other\n{STEP}"): "the effect of self.model",
    (STEP, f"    def register_forward_hook(self, f):\n        pass\n{STEP}"): "it replaces a part of each step",
    (STEP, f"    @torch.no_grad()\n{STEP}"): "@torch.no_grad()",
    (TRAIN, "        self.model.to(torch.bfloat16)\n"): "self.model.to(torch.bfloat16)",
    (TRAIN, f"{TRAIN}        self.model.eval()\n"): "self.model.eval() (Lightning since 2.2",
    (TRAIN, f"        other.train()\n{TRAIN.replace('train', 'train_later')}"): "no model.train() is called",
    (TRAIN, f"        if late:\n    {TRAIN}"): "or their modes are unknown",
    (TRAIN, f"{TRAIN}        self.model = other\n"): "another model takes the place",
    (TRAIN, f"{TRAIN}        self.model.__class__ = Other\n"): "self.model.__class__",
    (TRAIN, f"        if late:\n            return\n{TRAIN}"): "the lines after it may not run",
    (MAKE, f"        me = self\n        me.model = other\n{MAKE}"): "me.model = other",
    (MAKE, f"        self.model.eval()\n{MAKE}"): "self.model.eval() (modules are trained in evaluation mode",
    (MAKE, f"        self.lr_scheduler_step = skip\n{MAKE}"): "self.lr_scheduler_step (its effect on the model",
    (
        MAKE,
        f"        if late:\n            return None\n{MAKE}",
    ): "which optimizer and schedule it returns is known only",
    (MAKE, "        return other\n        x = torch.optim.AdamW"): "configure_optimizers does not return it",
    (LOSS, f'        self.log("x", self.model.eval())\n{LOSS}'): "self.log('x', self.model.eval())",
    (LOSS, "        return {'loss': self.model(**batch).loss, 'x': batch.pop('labels')}"): "batch.pop('labels')",
}


def _moved(*pairs: tuple[str, str]) -> RunDraft:
    draft = RunDraft()
    import_config.script(Script(Path("lit.py"), changed(*pairs, text=SCRIPT))).move(draft, None)
    for each in draft.at_end:
        each(draft)
    return draft


def test_a_data_module_is_read_with_the_values_it_is_created_with() -> None:
    draft = _moved()
    assert not draft.deciding()
    assert (draft.keys["batch_size"], draft.keys["data.max_length"], draft.keys["model.source"]) == (
        *(32, 64),
        "acme/encoder",
    )
    assert abs(draft.keys["optim.learning_rate"] - 2e-4) < 1e-12
    late = f"    def on_train_start(self):\n        self.model.train()\n{STEP}"
    assert _moved((TRAIN, ""), (STEP, late)).keys == draft.keys
    assert _moved((TRAIN, "")).keys != draft.keys or _moved((TRAIN, "")).deciding()
    assert not _moved((TRAIN, ""), (STEP, late)).deciding()
    assert _moved((TRAIN, ""), (STEP, late.replace("train()", "train(False)"))).deciding()


def test_a_method_that_encodes_the_rows_is_read_as_a_function() -> None:
    encode = 'lambda r: self.tokenizer(r["text"], truncation=True, max_length=64)'
    method = '    def encode(self, r):\n        return self.tokenizer(r["text"], truncation=True, max_length=64)\n'
    draft = _moved((encode, "self.encode"), (OF_DATA, f"{method}{OF_DATA}"))
    assert not draft.deciding()
    assert draft.keys == _moved().keys
    for change in (
        (method, method.replace('r["text"]', 'r["text"][:9]')),
        (method, method.replace("        return", '        r["label"] = [0 for _ in r["label"]]\n        return')),
        ("data = Data(", "class Other(Data):\n    def encode(self, r):\n        return {}\n\ndata = Data("),
        ("data = Data(", "Data.encode = None\ndata = Data("),
    ):
        assert _moved((encode, "self.encode"), (OF_DATA, f"{method}{OF_DATA}"), change).deciding(), change


def test_nothing_in_classes_of_lightning_is_passed_over() -> None:
    for pair, part in LOST.items():
        lines = "\n".join(map(str, _moved(pair).deciding()))
        assert part in lines, (pair, lines)


def test_a_checkpoint_by_a_score_evaluates_each_epoch() -> None:
    def trained(monitor: str, *more: tuple[str, str]) -> RunDraft:
        kept = f"max_epochs=3, callbacks=[pl.callbacks.ModelCheckpoint(monitor={monitor})]"
        return _moved(("max_epochs=3", kept), (STEP, f"{LOGS}{STEP}"), *more)

    draft = trained("'val_acc', mode='max'")
    assert (draft.keys["checkpoint.best"], draft.keys["evaluate.every"]) == ("accuracy", "epoch")
    assert any("monitor acc is taken as the task's accuracy" in note for note in draft.notes)
    assert trained("'val_loss'").keys["checkpoint.best"] == "-loss"
    assert any("monitor=val_f1" in gap.name for gap in trained("'val_f1'").deciding())
    two = ("callbacks=[", "callbacks=[pl.callbacks.EarlyStopping('val_loss'), ")
    assert any("look at two scores" in str(gap) for gap in trained("'val_acc', mode='max'", two).deciding())
    every = ("max_epochs=3", "max_epochs=3, check_val_every_n_epoch=2")
    assert any("when it evaluates" in gap.name for gap in trained("'val_loss'", every).deciding())
    few = ("max_epochs=3", "max_epochs=3, limit_val_batches=3")
    assert any("limit_val_batches=3" in gap.name for gap in trained("'val_loss'", few).deciding())
    assert any("every_n_epochs=2" in gap.name for gap in trained("'val_loss', every_n_epochs=2").deciding())
    assert any("every_n_train_steps=9" in gap.name for gap in trained("'val_loss', every_n_train_steps=9").deciding())
    assert trained("None, every_n_train_steps=9").keys["checkpoint.every"] == 9
    none = trained("'val_loss', save_top_k=0")
    assert "checkpoint.best" not in none.keys
    assert any("save_top_k=0" in gap.name for gap in none.gaps)


def test_a_score_that_is_not_logged_of_the_validation_rows_chooses_no_checkpoint() -> None:
    def best(monitor: str, logs: str, *more: tuple[str, str]) -> tuple[object, str]:
        kept = f"max_epochs=3, callbacks=[pl.callbacks.ModelCheckpoint(monitor={monitor!r}, mode='max')]"
        draft = _moved(("max_epochs=3", kept), (STEP, f"{logs}{STEP}"), *more)
        return draft.keys.get("checkpoint.best"), "\n".join(map(str, draft.deciding()))

    trains = (LOSS, f"        self.log('loss', 1)\n{LOSS}")
    assert "of the rows that it trains on" in best("loss", LOGS, trains)[1]
    assert "no method of the module logs it" in best("val_f1", LOGS)[1]
    shared = LOGS.replace("validation_step(self, batch, number)", "shared(self, batch, stage)").replace(
        '"val_', 'f"{stage}_'
    )
    called = f"{shared}    def validation_step(self, batch, number):\n        self.shared(batch, 'val')\n"
    assert best("val_acc", called) == ("accuracy", "")
    assert "no method of the module logs it" in best("train_acc", called)[1]
    assert best("val_acc", LOGS.replace('log("val_acc", 1)', "log_dict(self.scores)")) == ("accuracy", "")
    assert best("val_acc", LOGS)[1] == ""
    same = ('DataLoader(self.rows["validation"]', 'DataLoader(self.rows["train"]')
    assert "rows of the split 'train', which is trained on" in best("val_acc", LOGS, same)[1]
