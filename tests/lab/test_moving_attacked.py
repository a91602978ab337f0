"""`lockstep init --from`: kinds of lines that scripts of other people had and that were lost, or spoken of wrongly."""

import json
from pathlib import Path

import pytest

from lockstep.lab.import_config import import_config, loops, project_files
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft
from support.moving_scripts import (
    ACCELERATE,
    AFTER,
    DDP,
    DPO,
    LOOP,
    MODE,
    SCRIPT,
    TRAINER,
    USUAL,
    changed,
    in_loop,
    moved,
    refused,
)

OTHER_REFERENCE = (
    ("args = DPO", 'ref = AutoModelForCausalLM.from_pretrained("acme/base")\nargs = DPO'),
    ("DPOTrainer(model=model, args", "DPOTrainer(model, ref, args"),
)


def test_another_reference_model_is_refused_although_a_model_is_given(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = changed(*OTHER_REFERENCE, text=DPO)
    printed = refused("dpo.py", text, capsys, "model.source=acme/chat", "data.max_length=64")
    assert "ref_model=ref (its weights are those of acme/base; lockstep's reference is" in printed
    printed = refused("dpo.py", text.replace("acme/base", "acme/chat").replace('"ipo"', '["sigmoid", "sft"]'), capsys)
    assert "ref_model" not in printed
    assert "loss_type: ['sigmoid', 'sft'] (task.loss is" in printed  # it was a TypeError


def test_statements_that_may_rebind_any_name_are_refused(tmp_path: Path) -> None:
    def rebound(text: str) -> list[str]:
        return [each.partition(": ")[0] for each in project_files.rebound(Script(tmp_path / "train.py", text))]

    assert rebound("lr = 3e-4\nif lr:\n    from config.small import *\n") == ["line 3"]
    assert rebound("lr = 3e-4\nfrom torch.nn import *\nshown = list(globals())\n") == []
    assert rebound("from defaults import *\nlr = 3e-4\n") == []
    for text in ("exec(open('c.py').read())", "globals()['lr'] = 1", "globals().update(more)", "vars().update(more)"):
        assert rebound(f"lr = 3e-4\n{text}\n") == ["line 2"], text
    assert rebound("lr = 3e-4\nsetattr(sys.modules[__name__], 'lr', 1)\n") == ["line 2"]


@pytest.mark.parametrize(
    "text",
    [
        "from config import lr",
        "try:\n    from config import lr\nexcept ImportError:\n    pass",
        "def small():\n    global lr\n    lr = 1\nsmall()",
        "try:\n    open('x')\nexcept OSError as lr:\n    pass",
        "match mode:\n    case [lr, *_]:\n        pass",
        "match mode:\n    case {'a': 1, **lr}:\n        pass",
        "with open('x') as lr:\n    pass",
        "if (lr := 1) > 0:\n    pass",
        "*lr, last = 1, 2",
        "def lr():\n    pass",
    ],
)
def test_names_that_are_also_imported_or_global_have_no_known_value(text: str, tmp_path: Path) -> None:
    script = import_config.decided_branches.taken(
        Script(tmp_path / "train.py", f"lr = 3e-4\n{text}\nif lr:\n    x = f(lr=lr)\n")
    )
    call = next(each for each in script.calls if each.name == "f")
    assert script.arguments(call).unknown == {"lr": "lr"}
    assert call.condition is not None


def test_values_that_are_changed_in_place_or_set_by_a_class_are_unknown(tmp_path: Path) -> None:
    def unknown(text: str) -> bool:
        script = import_config.decided_branches.taken(Script(tmp_path / "train.py", text))
        call = next(each for each in script.calls if each.name == "f")
        return bool(script.arguments(call).unknown or script.arguments(call).more)

    options = "o = {'lr': 1, 'wd': 2}\n"
    change = "def change(given):\n    given['lr'] = 2\n"
    method = "class C:\n    lr = 1\n    def __init__(self):\n        self.lr = 2\n"
    for text in (
        f"{options}wd = o.pop('wd')\nx = f(**o)",
        f"{change}{options}if change(o):\n    pass\nx = f(**o)",
        f"{options}other = o\nother['lr'] = 2\nx = f(**o)",
        f"{options}held = {{'a': o}}\nheld['a']['lr'] = 2\nx = f(**o)",
        f"{options}for each in [o]:\n    each['lr'] = 2\nx = f(**o)",
        "rates = [2, 1]\nrates.sort()\nx = f(lr=rates[0])",
        f"{method}c = C()\nx = f(lr=c.lr)",
        "class C:\n    lr = 1\n    lr = 2\nx = f(lr=C.lr)",
        "class C:\n    lr = 1\n    if mode:\n        lr = 2\nx = f(lr=C.lr)",
        "x = f(*rates)",
    ):
        assert unknown(text), text
    for text in (f"{options}wd, same = o.get('wd'), o\nx = f(**o)", "class C:\n    lr = 1\nx = f(lr=C.lr)"):
        assert not unknown(text), text


def test_function_headers_decorators_and_redefinitions_are_checked_as_statements(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss, before = "            accelerator.backward(loss)\n", "model.train()\n"
    zero = "def zero(m):\n    m.weight.data.zero_()\nclass Log:\n    def zero(self):\n        print(1)\nzero(model)\n"
    text = ACCELERATE.replace(loss, f"            for loss in [loss * 2]:\n                import batch\n{loss}")
    text = text.replace(before, f"@optimizer.register_step_post_hook\ndef f(*a):\n    pass\n{zero}{before}")
    printed = refused("loop.py", text.replace("in range(3):\n", "in range(3):\n    set_seed(3)\n"), capsys)
    for code in ("optimizer.register_step_post_hook", "loss", "import batch", "zero(model)", "set_seed(3)"):
        assert f": {code} (" in printed, code
    text = TRAINER.replace("ARGUMENTS", "").replace("data = data", "tokenize = len\ndata = data")
    trainer = "setattr(Trainer, 'compute_loss', None)\nfor args.max_steps in (5,):\n    pass\ntrainer = Trainer"
    printed = refused("train.py", text.replace("trainer = Trainer", trainer), capsys)
    for code in ("setattr(Trainer, 'compute_loss', None)", "for args.max_steps in (5,): pass", "data.map(tokenize"):
        assert f": {code}" in printed, code


def test_statements_around_an_unread_loop_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = "batches = iter(train)\nfor epoch in range(3):\n    for k in range(4):\n        batch = next(batches)"
    start = ACCELERATE.index("for epoch in range(3):\n    for batch in train:")
    text = ACCELERATE[:start] + ACCELERATE[start:].replace(
        "for epoch in range(3):\n    for batch in train:", f"exec(open('more.py').read())\n{loop}"
    )
    printed = refused("loop.py", text, capsys)
    assert "is not one over the batches of a DataLoader: no line of it is read)" in printed
    assert "exec(open('more.py').read())" in printed
    assert printed.count("exec(") == 1
    assert "open('more.py').read() (" not in printed


def test_frozen_weights_averages_and_ranges_are_named_with_their_keys(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = "optimizer = torch"
    frozen = "for p in model.classifier.parameters():\n    p.requires_grad_(False)\n"
    mean = "swa = torch.optim.swa_utils.AveragedModel(model)\n"
    text = ACCELERATE.replace(before, f"{frozen}{mean}first = int(input())\n{before}")
    printed = refused("loop.py", text.replace("in range(3)", "in range(first, 3)"), capsys)
    assert "p.requires_grad_(False) (model.freeze names the weights" in printed
    assert "AveragedModel(model) (checkpoint.average averages weights" in printed
    assert "`lockstep list` names the optimizers" not in printed
    assert ": range(first, 3) (" in printed
    assert "range(range(" not in printed
    stepped = DDP.replace("optimizer = ", "optimizer = ", 1).replace(
        "    for epoch", "    lr = torch.optim.lr_scheduler.StepLR(optimizer, 9)\n    for epoch", 1
    )
    assert refused("loop.py", stepped, capsys).count("StepLR(optimizer, 9)") == 1


def test_the_smaller_of_a_length_and_the_tokenizers_is_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINER.replace("max_length=256", "max_length=min(256, tokenizer.model_max_length)")
    run = moved("train.py", text.replace("ARGUMENTS", "eval_strategy='epoch', save_strategy='epoch'"))
    assert run.data.max_length == 256
    assert "data.max_length is 256; at line 12, texts are no longer than the tokenizer's" in capsys.readouterr().out


def test_a_recipe_of_torchtune_is_not_taken_for_arguments_of_trainer(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = "{_component_: torchtune.models.x, lora_rank: 8, lora_alpha: 16, lora_attn_modules: [q_proj], "
    Path("recipe.yaml").write_text(
        f"output_dir: out\nshuffle: False\nbatch_size: 4\nmodel: {lora}apply_lora_to_mlp: True, lora_dropout: 0.1}}\n"
    )
    printed = refused("recipe.yaml", Path("recipe.yaml").read_text(), capsys)
    assert "is a recipe of torchtune" in printed
    assert "lora_dropout: 0.1, target_modules: [q_proj, gate_proj, up_proj, down_proj]" in printed
    assert "# shuffle: False has no counterpart" in printed


def test_a_gap_is_listed_once() -> None:
    draft = RunDraft()
    draft.lacks("line 3: x", "one reason", "model.freeze")
    draft.unclear("line 3: x", "another", "model.freeze")
    assert len(draft.gaps) == 1
    draft.unclear("line 3: x", "one that no key replaces")
    assert len(draft.gaps) == 2


def test_deepspeed_reads_the_names_of_its_optimizers_in_any_case(here: Path) -> None:
    keys = {"train_batch_size": 8, "optimizer": {"type": "adamw", "params": {"lr": 1e-4}}}
    run = moved("ds.json", json.dumps(keys), "--partial", "model.type=bert", "data.source=x.csv")
    assert (run.optim.name, run.optim.learning_rate) == ("adamw", 1e-4)


LIT = """
import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

class Lit(L.LightningModule):
    def __init__(self, lr=2e-5):
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForSequenceClassification.from_pretrained("acme/encoder")
        self.model.train()
    def training_step(self, batch, i):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, i):
        self.log("val_loss", self.model(**batch).loss)
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = get_linear_schedule_with_warmup(optimizer, 100, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": sched, "interval": "step"}}

trainer = L.Trainer(max_steps=2000, gradient_clip_val=1.0, callbacks=[EarlyStopping("val_loss", patience=3)])
trainer.fit(Lit(lr=5e-5), DataLoader(data, batch_size=32, shuffle=True), DataLoader(dev, batch_size=64))
"""
HOOK = "    def on_after_backward(self):\n        for p in self.parameters():\n            p.grad.mul_(0.5)\n"
LOST_IN_LIGHTNING = {  # what is changed -> a part of the gap
    (', "interval": "step"', ""): "Lightning advances it once an epoch",
    ('"step"}', '"step", "frequency": 2}'): "Lightning advances it once an epoch",
    ("    def configure", f"{HOOK}    def configure"): "Lit.on_after_backward (the effect of p.grad.mul_(0.5)",
    ("callbacks=[", "callbacks=[StochasticWeightAveraging(1e-2), "): "the callback StochasticWeightAveraging",
    ("callbacks=[", "accumulate_grad_batches={0: 4}, callbacks=["): "accumulate_grad_batches={0: 4}",
    ("callbacks=[", "use_distributed_sampler=False, callbacks=["): "use_distributed_sampler=False",
    ("callbacks=[", "check_val_every_n_epoch=2, callbacks=["): "when it evaluates (EarlyStopping",
    ("patience=3", "stopping_threshold=0.9"): "stopping_threshold=0.9",
    (".loss\n", ".loss * 0.5\n"): "loss = self.model(**batch).loss * 0.5 (it changes what a step learns",
    ("        loss =", "        batch['labels'] = 0\n        loss ="): "batch['labels'] = 0 (it changes what",
    ("self.model.train()", "self.automatic_optimization = False"): "the module steps its optimizer itself",
    ("self.model.train()", "torch.nn.init.zeros_(self.model.classifier.bias)"): "zeros_(self.model.classifier.bias)",
    ("trainer = L", "lit = Lit()\nlit.freeze()\ntrainer = L"): "lit.freeze()",
    (
        "trainer = L",
        "lit = Lit()\nfor m in [lit]:\n    m.model.bias.data.zero_()\ntrainer = L",
    ): "m.model.bias.data.zero_()",
    ("trainer.fit", "trainer.callbacks.append(mine)\ntrainer.fit"): "trainer.callbacks.append(mine)",
    ("trainer.fit", "trainer.accumulate_grad_batches = 2\ntrainer.fit"): "trainer.accumulate_grad_batches = 2",
    ("    def training", "    @twice\n    def training"): "@twice (its effect on training",
    ("    def training", "    automatic_optimization = False\n    def training"): "automatic_optimization = False",
    (
        "    def training",
        "    def on_after_batch_transfer(self, b, i):\n        return 0\n    def training",
    ): "the batches",
    (
        "        optimizer =",
        "        self.model.bias.data.zero_()\n        optimizer =",
    ): "self.model.bias.data.zero_()",
    ("self.model.train()", "pass"): "no model.train() is called (Lightning since 2.2",
    ("32, shuffle=True), Data", "32, shuffle=True), ckpt_path='a.ckpt', val_dataloaders=Data"): "ckpt_path='a.ckpt'",
}


def in_lightning(*pairs: tuple[str, str]) -> RunDraft:
    draft = RunDraft()
    result = loops.read(Script(Path("lit.py"), changed(*pairs, text=LIT)))
    assert result is not None
    result[1](draft, 1)
    for each in draft.at_end:
        each(draft)
    return draft


def test_a_module_of_lightning_is_read_and_what_changes_a_step_is_not_lost() -> None:
    usual = in_lightning()
    gaps = {str(each) for each in usual.gaps}
    assert all("columns" in each for each in gaps), gaps
    assert (usual.keys["optim.learning_rate"], usual.keys["optim.warmup_steps"], usual.keys["steps"]) == (
        5e-5,
        100,
        2000,
    )
    assert not any("is assumed to be its length" in note for note in usual.notes)
    for pair, part in LOST_IN_LIGHTNING.items():
        more = "\n".join({str(each) for each in in_lightning(pair).gaps} - gaps)
        assert part in more, (pair, more)
    timed = in_lightning(
        ("patience=3", "min_delta=0.01, patience=2"), ("callbacks=", "max_time='00:03:50:00', callbacks=")
    )
    assert [timed.keys[key] for key in ("evaluate.min_delta", "evaluate.patience", "max_time")] == [0.01, 2, "3h50m"]


ZERO = "m.weight.data.zero_()"
HIDDEN = {  # lines before the loop that change the model inside of something that is called -> a part of the gap
    f"def mk(m):\n    def z():\n        {ZERO}\n    return z\nz = mk(model)\nz()": "z() (the effect of line 27, m",
    f"class Z:\n    def __call__(self, m):\n        {ZERO}\nz = Z()\nz(model)": ": Z() (the effect of line 27,",
    f"class Z:\n    def __exit__(self, *m):\n        {ZERO}\nwith Z():\n    pass": ": Z() (the effect of line 27,",
    f"def z(m):\n    {ZERO}\np = partial(z, model)\np()": ": p() (the effect of line 26,",
    f"class A:\n    def log(self, m):\n        {ZERO}\nclass C(A):\n    pass\nc = C()\nc.log(model)": "c.log(model) (",
    "def twice(f):\n    return f\n@twice\ndef f(m):\n    pass\nf(model)": "the effect of line 27, twice, on",
    "hook = model.register_forward_hook\n@hook\ndef f(*m):\n    pass": "it registers f, whose effect",
}


RECORD = "from torch.distributed.elastic.multiprocessing.errors import record\n"


def test_statements_inside_calls_are_read_and_named() -> None:
    for lines, part in HIDDEN.items():
        assert part in in_loop(changed((LOOP, f"{lines}\n{LOOP}"))), lines
    meter = "class Meter:\n    def __init__(self):\n        self.n = 0\nm = Meter()\n"
    recorded = f"{RECORD}@record\ndef f(m):\n    print(m)\nf(model)\n{meter}"
    assert in_loop(changed((LOOP, f"{recorded}{LOOP}"))) == in_loop(SCRIPT)


def test_functions_that_train_or_build_data_are_checked() -> None:
    of_x = "x = torch.randn(n, 4)\n    return TensorDataset(x, x.sin().sum(-1))"
    made = f"from torch.utils.data import TensorDataset\ndef make(n):\n    {of_x}\n\n\ndef main"
    data = changed(("Points(600)", "make(600)"), ("def main", made), text=DDP)
    assert in_loop(data) == in_loop(DDP)
    for inside in ("torch.set_default_dtype(d)", "global model", "model.bias.data.zero_()"):
        assert "make(600)" in in_loop(data.replace("    return Ten", f"    {inside}\n    return Ten")), inside
    assert ": twice (this decorator may replace main" in in_loop(
        DDP.replace("def main", "def twice(f):\n    return f\n\n\n@twice\ndef main")
    )
    assert in_loop(DDP.replace("def main", f"{RECORD}@record\ndef main")) == in_loop(DDP)
    start, inner = DDP.index("            out = "), "    def ev(*m):\n        pass\n    for epoch"
    step = "def step(m, x, y, f):\n    loss = f(m(x), y)\n    loss.backward()\n\n\ndef main"
    text = DDP[:start] + "            step(model, x, y, criterion)\n            optimizer.step()\n\n\nmain()\n"
    text = changed(("def main", step), ("    for epoch", f"    @optimizer.register_step_post_hook\n{inner}"), text=text)
    assert "optimizer.register_step_post_hook('ev')" in in_loop(text)


RATE = "get_linear_schedule_with_warmup(optimizer, 50, len(train) * 3)"
STEPPED = changed(
    ("optimizer = ", f"rate = {RATE}\noptimizer = "), (AFTER, f"        rate_scheduler.step()\n{AFTER}")
).replace(f"rate = {RATE}\noptimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)", "RATES")
STEPPED = STEPPED.replace(
    "RATES", f"optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)\nrate_scheduler = {RATE}"
).replace("import torch\n", "import torch\nfrom transformers import get_linear_schedule_with_warmup\n", 1)
LOST_IN_LOOPS = {  # what is changed -> a part of the gap or note
    (MODE, ""): "no model.train() is called before it",
    ('("encoder")\noptimizer', '("encoder").to(device)\noptimizer'): "",
    (
        "        optimizer.step()\n        rate_scheduler.step()\n",
        "        rate_scheduler.step()\n        optimizer.step()\n",
    ): "the schedule advances before the optimizer's step",
    ("50, len(train) * 3", "50, len(train) * 3, last_epoch=9"): "last_epoch=9 (the schedule begins at another step",
    ("enumerate(train)", "enumerate(tqdm(train))"): "",
    ("import torch\n", "import torch\ntorch.set_float32_matmul_precision('high')\n"): "rounded to fewer bits",
    ("import torch\n", "import torch\ntorch.backends.cuda.enable_flash_sdp(False)\n"): "not carried over",
    (
        "import torch\n",
        "import os\nimport torch\nos.environ.update(ACCELERATE_MIXED_PRECISION='bf16')\n",
    ): "reads a setting",
    ("import torch\n", "import torch\nsetattr(torch.optim.AdamW, 'step', None)\n"): "AdamW, 'step'",
    ('DataLoader(data["train"]', 'DataLoader(list(data["train"])[:9]'): "code of the script builds these rows",
    ('DataLoader(data["train"]', 'DataLoader(data["train"][:9]'): "code of the script builds these rows",
    ('"acme/reviews"', '"acme/reviews", split={"train": "train[:9%]"}'): "use a whole split",
    (
        'AutoTokenizer.from_pretrained("encoder"',
        'AutoTokenizer.from_pretrained("encoder", legacy=False',
    ): "legacy=False",
    (
        'AutoTokenizer.from_pretrained("encoder"',
        'AutoTokenizer.from_pretrained("encoder", revision="a"',
    ): "revision=a (",
    (
        "data = raw",
        "raw = raw['train'].train_test_split(test_size=0.2, seed=1)\ndata = raw",
    ): "lockstep draws the held-out rows with its own seed",
    ("import get_linear", "import AutoConfig\nfrom utils import get_linear"): f": {RATE} (",
    (
        LOOP,
        f"class O:\n    def step(self):\n        pass\n    def zero_grad(self):\n        pass\noptimizer = O()\n{LOOP}",
    ): "it is the script's own method, line",
}


AGAIN = 'train = DataLoader(data["train"], shuffle=True, batch_size=4)'
LOST_IN_LOOPS |= {
    (LOOP, f"{AGAIN}\n{LOOP}"): "the loop may go through this loader, and through that of line",
    (LOOP, f"other = {AGAIN[8:]}\ntrain = other\n{LOOP}"): "the loop may go through this loader",
    (LOOP, f"def again():\n    global train\n    {AGAIN}\nagain()\n{LOOP}"): "the loop may go through this loader",
    (LOOP, f"import mine as wandb\nwandb.log(model)\n{LOOP}"): ": wandb.log(model) (its effect",
    (LOOP, f"def len(n):\n    return 5\n{LOOP}"): "len (it replaces a built-in function",
    (LOOP, f"best = 0\nif score > best:\n    torch.save(1, 'a')\n{LOOP}"): "the original keeps its best model",
    (
        "train = D",
        'tokenizer = AutoTokenizer.from_pretrained("b")\ntrain = D',
    ): "tokenizer.source is encoder by an earlier",
    ("data = raw.map(lambda rows:", "@neg\ndef f(rows):\n    return 0\ndata = raw.map(f)\nraw.map(lambda rows:"): (
        "its decorator neg may change the rows"
    ),
    ("loss = model(**batch)", "loss = model(batch)"): "this computation of the loss is not understood",
}


def test_settings_of_a_loop_that_were_dropped_silently() -> None:
    usual = set(in_loop(STEPPED).splitlines())
    for pair, part in LOST_IN_LOOPS.items():
        lines = set(in_loop(changed(pair, text=STEPPED)).splitlines())
        assert part in "\n".join(lines - usual), pair
    bar = changed(("enumerate(train)", "enumerate(tqdm(train))"), text=STEPPED)
    assert "is not one over the batches" in in_loop(f"from utils import tqdm\n{bar}")
    assert set(in_loop(f"from tqdm.auto import tqdm\n{bar}").splitlines()) == usual
    moved_model = changed((MODE, ""), ('("encoder")\nopt', '("encoder").to(device)\nopt'), text=STEPPED)
    assert "no model.train() is called before it" in in_loop(moved_model)
    for loss in ("model(**batch)[0]", "model(**batch)['loss']"):
        assert set(in_loop(changed(("model(**batch).loss", loss), text=STEPPED)).splitlines()) == usual, loss
    cosine = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(train) * 3)"
    for schedule in (cosine, "get_scheduler('cosine_with_min_lr', optimizer, 50, len(train) * 3)"):
        assert "optim.schedule" not in in_loop(STEPPED.replace(RATE, schedule)), schedule


INIT = "    def __init__(self, *a, **k):\n        super().__init__(*a, **k)\n"
LOST_IN_TRAINERS = {  # lines of a subclass, or what is changed -> a part of the gap or note
    f"{INIT}        self.args.learning_rate = 1": "T.__init__ (the effect",
    "    def log(self, logs):\n        self.optimizer.param_groups[0]['lr'] = 1": "T.log (the effect of line",
    "    def evaluate(self):\n        self.control.should_training_stop = True": "T.evaluate (the effect of line",
    "    def floating_point_ops(self, inputs):\n        inputs['labels'] = 0": "T.floating_point_ops (the effect",
    ("trainer = Trainer", "M = type('M', (Trainer,), {'compute_loss': f})\ntrainer = M"): "which class it makes",
    ("NAME =", "from mine import Trainer\nNAME ="): "(Trainer is imported from mine.Trainer",
    ("NAME =", "from mine import *\nNAME ="): "(Trainer is replaced by an import of *",
    ("NAME =", "def load_dataset(*n):\n    return n\nNAME ="): "(load_dataset is the script's own",
    ("NAME =", "import mine\nmine.patch()\nNAME ="): "mine.patch() (its effect",
    (
        "args = T",
        "from peft import LoraConfig\nc = LoraConfig(r=4)\nc.r = 9\nargs = T",
    ): ": c.r (it changes the result of",
    ('rows["review"]', 'rows["a"], rows["b"]'): "",
    ("trainer.train()", "trainer.train('out/checkpoint-5')"): "resume_from_checkpoint='out/checkpoint-5' (",
    ("trainer.train()", "trainer.evaluate()"): "the script never calls train()",
}


def test_settings_of_a_trainer_that_were_dropped_silently() -> None:
    text = TRAINER.replace("ARGUMENTS", "")
    usual = set(in_loop(text).splitlines())

    def more(*pairs: tuple[str, str]) -> str:
        return "\n".join(set(in_loop(changed(*pairs, text=text)).splitlines()) - usual)

    for pair, part in LOST_IN_TRAINERS.items():
        of_class = ("trainer = Trainer(", f"class T(Trainer):\n{pair}\ntrainer = T(")
        assert part in more(of_class if isinstance(pair, str) else pair), pair
    mixed = "class A:\n    def compute_loss(self):\n        pass\nclass T(A, Trainer):\n    pass\ntrainer = T("
    assert "A.compute_loss (it replaces the loss" in more(("trainer = Trainer(", mixed))
    pairs = ('rows["review"], truncation=True', 'rows["a"], rows["b"], truncation="only_first"')
    assert "truncation='only_first' (the longer" in more(pairs)
    plain = "    def evaluate(self, *a):\n        m = super().evaluate(*a)\n        m['x'] = 1\n        self.log(m)"
    log = "    def log(self, logs):\n        logs['x'] = 1\n        super().log(logs)"
    assert ": T" not in more(("trainer = Trainer(", f"class T(Trainer):\n{INIT}{plain}\n{log}\ntrainer = T("))


def test_a_trainer_that_may_change_the_score_of_its_best_checkpoint_is_refused() -> None:
    text = TRAINER.replace("ARGUMENTS", USUAL.replace("'accuracy'", "'f1'"))
    plain = "    def evaluate(self, *a, **k):\n        m = super().evaluate(*a, **k)\n        LINE\n        return m\n"
    log = "    def log(self, logs, *a):\n        LINE\n        super().log(logs, *a)\n"

    def changes(methods: str, whole: str = text) -> bool:
        derived = f"class T(Trainer):\n{methods}trainer = T("
        return "by which the checkpoint is chosen" in in_loop(changed(("trainer = Trainer(", derived), text=whole))

    for line in (
        *("m['eval_f1'] = 1", "m['f1'] = 1", "m[f'{a[0]}_f1'] = 1", "m[name()] = 1", "m.update(eval_f1=1)"),
        *("m |= {'eval_f1': 1}", "m = dict(m, eval_f1=1)", "m.pop('eval_f1')", "del m['eval_f1']"),
    ):
        assert changes(plain.replace("LINE", line)), line
    for line in ("m['eval_x'] = m['eval_f1']", "print(m['eval_f1'])", "m[f'{a[0]}_x'] = 1", "m.update({'eval_x': 1})"):
        assert not changes(plain.replace("LINE", line)), line
    assert changes(plain.replace("return m", "return {'eval_f1': 1}").replace("LINE", "pass"))
    assert changes(plain.replace("evaluate(*a, **k)\n        LINE", "evaluate(self.train_dataset)\n        pass"))
    assert changes(log.replace("LINE", "logs['eval_f1'] = 1"))
    assert not changes(log.replace("LINE", "logs['x'] = 1"))
    assert not changes(plain.replace("LINE", "m['eval_f1'] = 1"), TRAINER.replace("ARGUMENTS", ""))


def test_a_loop_of_accelerate_steps_as_it_prepares_and_accumulates() -> None:
    def draft(text: str, processes: int = 4) -> RunDraft:
        new = RunDraft()
        import_config.script(Script(Path("train.py"), text)).move(new, processes)
        return new

    for count, steps in (("100", 25), ("30 * accelerator.num_processes", 30)):
        assert draft(changed(("=100", f"={count}"), text=ACCELERATE)).keys["optim.warmup_steps"] == steps
    assert "num_warmup_steps=102 (the schedule advances 4 times" in str(
        draft(ACCELERATE.replace("=100", "=102")).gaps[0]
    )
    plain = changed(
        (', mixed_precision="bf16"', ""),
        ("loss = model(", "with accelerator.autocast():\n                loss = model("),
        text=ACCELERATE,
    )
    assert "precision" not in draft(plain).keys
    alone = draft(changed(("with accelerator.accumulate(model):", "if True:"), text=ACCELERATE))
    assert "without accumulate() it only divides the loss" in str(alone.gaps[0])
    out = changed(
        ("model, optimizer, train, dev, schedule = ", "x = "),
        ("(model, optimizer, train", "(model, train"),
        text=ACCELERATE,
    )
    assert "it is not passed to prepare()" in str(draft(out).gaps[0])


SNAPSHOT = """
    start = 0
    if os.path.exists("a.pt"):
        saved = torch.load("a.pt")
        model.load_state_dict(saved["model"])
        start = saved["epoch"]
    for epoch in range(start, args.epochs):
        torch.save({"model": model.state_dict(), "epoch": epoch}, "a.pt")
"""


def test_resuming_from_an_own_snapshot_is_noted() -> None:
    text = changed(("    for epoch in range(args.epochs):\n", SNAPSHOT[1:]), text=f"import os\n{DDP}")
    assert "if os.path.exists('a.pt'): ... is left out" in in_loop(text)
    assert "not understood" not in in_loop(text)
    for other in (('"epoch": epoch}, "a.pt"', '"epoch": epoch}, "b.pt"'), ("start = saved", "args.lr = saved")):
        assert "load_state_dict(saved" in in_loop(changed(other, text=text)), other


def test_networks_passed_to_a_lightning_module_are_checked() -> None:
    net = 'AutoModelForSequenceClassification.from_pretrained("acme/encoder")'
    text = changed(("self, lr", "self, net, lr"), (f"self.model = {net}", "self.model = net"), text=LIT)
    text = changed(("trainer.fit(Lit(", f"net = {net}\nNEXT\ntrainer.fit(Lit(net, "), text=text)
    usual = in_loop(text.replace("NEXT", "pass"))
    for line in ("torch.nn.init.zeros_(net.classifier.bias)", "for p in net.parameters():\n    p.data.zero_()"):
        assert "zero" in in_loop(text.replace("NEXT", line)).replace(usual, ""), line


def test_hooks_of_lightning_that_replace_or_change_a_step_are_refused() -> None:
    usual = in_loop(LIT)
    text = LIT.replace("    def validation_step(", "    def _validation_step(")
    for head, body in (
        ("optimizer_step(self, *a)", "pass"),
        ("on_train_batch_start(self, b, i)", "return -1"),
        ("on_train_epoch_start(self)", "self.model.encoder.eval()"),
        ("setup(self, stage)", "self.model.encoder.requires_grad_(False)"),
        ("validation_step(self, b, i)", "self.trainer.optimizers[0].param_groups[0]['lr'] = 1"),
        ("on_validation_epoch_end(self)", "self.trainer.should_stop = True"),
        ("test_step(self, b, i)", "o = self.optimizers()\n        o.step()"),
        ("predict_step(self, b, i)", "for p in self.parameters():\n            p += 1"),
        ("on_save_checkpoint(self, c)", "self.model.eval()"),
        ("named_modules(self)", "return []"),
        ("val_dataloader(self)", "m = self.model.encoder\n        m.dropout.p = 0"),
    ):
        method = f"    def {head}:\n        {body}\n    def training"
        assert f"Lit.{head.partition('(')[0]} (" in in_loop(changed(("    def training", method), text=text)), head
    step = "out = self.model(**b)\n        a = (out.logits.argmax(-1) == b['labels']).float().mean()"
    plain = f"    def validation_step(self, b, i):\n        {step}\n        self.log('a', a)\n    def training"
    assert len(in_loop(changed(("    def training", plain), text=LIT)).splitlines()) == len(usual.splitlines())


def test_columns_that_trl_takes_by_name_and_options_of_its_model_are_read() -> None:
    def drafted(*pairs: tuple[str, str]) -> RunDraft:
        draft = RunDraft()
        import_config.script(Script(Path("train.py"), changed(*pairs, text=DPO))).move(draft, 1)
        return draft

    def columns(renaming: str) -> list[str | None]:
        keys = drafted(('split="train")', f'split="train"){renaming}')).keys
        return [keys.get(f"task.{name}") for name in ("prompt", "chosen", "rejected")]

    assert columns('.rename_columns({"chosen": "rejected", "rejected": "chosen"})') == [None, "rejected", "chosen"]
    one_by_one = '.rename_column("chosen", "x").rename_column("rejected", "chosen").rename_column("x", "rejected")'
    assert columns(one_by_one) == [None, "rejected", "chosen"]
    assert columns('.rename_column("question", "prompt")') == ["question", None, None]
    gaps = drafted(('split="train")', 'split="train").rename_column("score", "margin")')).gaps
    assert any("score, renamed to margin (" in str(gap) for gap in gaps)
    options = 'model_init_kwargs={"num_hidden_layers": 4, "dtype": "bfloat16"}, logging_steps'
    draft = drafted(("logging_steps", options))
    assert draft.keys["model.dtype"] == "bfloat16"
    assert any("num_hidden_layers: 4" in str(gap) for gap in draft.gaps)
