"""`lockstep init --from`: each argument of a call that is read is read, printed or refused."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import datasets
import peft
import pytest
import torch
import transformers
from torch.distributed import fsdp
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from lockstep.lab.import_config import call_arguments, import_config
from lockstep.lab.import_config.script import Call, Script
from lockstep.lab.import_config.table import NAMES, RunDraft
from support.moving_scripts import ACCELERATE, DDP, changed, in_loop

REAL: dict[str, Any] = {
    "Accelerator": accelerate.Accelerator,
    "accelerate.Accelerator.backward": accelerate.Accelerator.backward,
    "DataLoader": DataLoader,
    "DistributedSampler": DistributedSampler,
    "RandomSampler": RandomSampler,
    "GradScaler": torch.amp.GradScaler,
    "autocast": torch.autocast,
    "torch.cuda.amp.autocast": torch.cuda.amp.autocast,
    "torch.cuda.amp.GradScaler": torch.cuda.amp.GradScaler,
    "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
    "DDP": torch.nn.parallel.DistributedDataParallel,
    "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
    "FSDP": fsdp.FullyShardedDataParallel,
    "FullyShardedDataParallel": fsdp.FullyShardedDataParallel,
    "fully_shard": fsdp.fully_shard,
    "torch.compile": torch.compile,
    "set_seed": transformers.set_seed,
    "torch.manual_seed": torch.manual_seed,
    "get_scheduler": transformers.get_scheduler,
    "CosineAnnealingLR": torch.optim.lr_scheduler.CosineAnnealingLR,
    "optimizer.zero_grad": torch.optim.Optimizer.zero_grad,
    "scaler.step": torch.amp.GradScaler.step,
    "scaler.unscale_": torch.amp.GradScaler.unscale_,
    "scaler.scale": torch.amp.GradScaler.scale,
    "scaler.update": torch.amp.GradScaler.update,
    "set_epoch": DistributedSampler.set_epoch,
    **{name: getattr(torch.optim, name) for name in ("AdamW", "Adam", "SGD", "Adafactor", "Muon")},
    **{name: getattr(transformers.optimization, name) for name in call_arguments.LOOPS if name.startswith("get_")},
}
ELSEWHERE = {  # rows of libraries that may be absent, and those that take any objects
    *("prepare", "accumulate", "transformers.Adafactor", "AdamW8bit", "Adam8bit", "Lion", "Trainer", "fit"),
    *("EarlyStopping", "ModelCheckpoint", "seed_everything", "loss.backward", "optimizer.step", "scheduler.step"),
}


def _parameters(function: Any) -> list[inspect.Parameter]:
    listed = list(inspect.signature(function).parameters.values())
    return [each for each in listed if each.name != "self" and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def test_no_argument_is_passed_over() -> None:
    assert call_arguments.LOOPS.keys() == REAL.keys() | ELSEWHERE
    _check_names(REAL)
    assert _tried(REAL) > 200


@pytest.mark.long  # it imports Lightning
def test_arguments_of_lightning_are_read_or_refused() -> None:
    lightning, callbacks = pytest.importorskip("lightning"), pytest.importorskip("lightning.pytorch.callbacks")
    real = {"Trainer": lightning.Trainer, "fit": lightning.Trainer.fit, "seed_everything": lightning.seed_everything}
    real |= {name: getattr(callbacks, name) for name in ("EarlyStopping", "ModelCheckpoint")}
    _check_names(real)
    assert _tried(real) > 40
    parts = ("lightning_methods", "lightning_replaces", "lightning_inner", "lightning_hooks")
    listed = {"configure_optimizers", *(name for part in parts for name in NAMES[part])}
    assert {name for name in dir(lightning.LightningModule) if not name.startswith("__")} <= listed
    listed = {name for part in ("lightning_data_methods", "lightning_data_replaces") for name in NAMES[part]}
    assert {name for name in dir(lightning.LightningDataModule) if name[:1] != "_"} <= listed


def _check_names(functions: dict[str, Any]) -> None:
    older = {
        "even_batches",
        "correct_bias",
        "no_deprecation_warning",
        "retain_graph",
        "device_specific",
        "shapes_spec",
    }  # of earlier releases, and **
    for name, function in functions.items():
        row, parameters = call_arguments.LOOPS[name], _parameters(function)
        plain = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
        order = list(row.get("order", ()))
        assert plain[: len(order)] == order, name
        listed = {each for part in ("read", "code", "quiet", "told", "usual") for each in row.get(part, ())}
        listed -= older
        assert listed <= {each.name for each in parameters}, (name, listed - {each.name for each in parameters})
        defaults = {each.name: each.default for each in parameters}
        for argument, usual in row.get("usual", {}).items():
            real = defaults[argument]
            same = usual is None or usual == (list(real) if isinstance(real, tuple) else real)
            assert same, (name, argument)


def _tried(functions: dict[str, Any]) -> int:
    """Each parameter that is not on its call's list of arguments without effect is named when its value is another one;
    one that is read by its value, when the value is known only when the script runs."""
    tried = 0
    for name, function in functions.items():
        row = call_arguments.LOOPS[name]
        for each in _parameters(function):
            decided = {*row.get("read", ()), *row.get("told", ()), *row.get("usual", ())}
            if each.name in {*row.get("quiet", ()), *row.get("code", ()), *row.get("order", ())} - decided:
                continue
            values = ["unknown"] if each.name in row.get("read", ()) else ["unknown", "'other'", "123"]
            for value in values:
                draft = RunDraft()
                node = ast.parse(f"f({each.name}={value})", mode="eval").body
                assert isinstance(node, ast.Call)
                script = Script(Path("x.py"), "")
                call_arguments.check(script, draft, Call(node, name.rpartition(".")[2], name), row)
                assert any(each.name in gap.name for gap in draft.gaps), (name, each.name, value)
                tried += 1
    return tried


READ_IN_LOOPS = {  # a call of the script -> values of its arguments, each of which must be seen
    "Accelerator(": {
        "mixed_precision": '"fp16"',
        "gradient_accumulation_steps": "2",
        "split_batches": "True",
        "dataloader_config": "config",
        "gradient_accumulation_plugin": "plugin",
        "step_scheduler_with_optimizer": "False",
        "kwargs_handlers": "[AutocastKwargs(enabled=False)]",
    },
    "DataLoader(data['train']": {
        "batch_size": "3",
        "shuffle": "False",
        "sampler": "WeightedRandomSampler(w, 9)",
        "batch_sampler": "batches",
        "drop_last": "True",
        "collate_fn": "other",
    },
    "AdamW(": {
        "lr": "1.0",
        "betas": "(0.5, 0.9)",
        "eps": "0.1",
        "weight_decay": "0.3",
        "amsgrad": "True",
        "maximize": "True",
    },
    "get_linear_schedule_with_warmup(": {"num_warmup_steps": "7", "num_training_steps": "9", "last_epoch": "5"},
}


@pytest.mark.long  # 2 s
def test_each_argument_that_is_read_changes_the_run_file_or_is_named() -> None:
    for start, values in READ_IN_LOOPS.items():
        for name, value in values.items():
            tree = ast.parse(ACCELERATE)
            calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and start in ast.unparse(n)]
            call = min(calls, key=lambda n: len(ast.unparse(n)))
            call.keywords = [word for word in call.keywords if word.arg != name]
            call.keywords.append(ast.keyword(name, ast.parse(value, mode="eval").body))
            assert _moved(ast.unparse(tree)) != _moved(ast.unparse(ast.parse(ACCELERATE))), (start, name)


def _moved(text: str) -> tuple[Any, ...]:
    draft = RunDraft()
    import_config.script(Script(Path("train.py"), text)).move(draft, 1)
    for each in draft.at_end:
        each(draft)
    return draft.keys, list(map(str, draft.gaps)), draft.notes


# -- the order and place of what a step is made of ---------------------------------------------------------------------

FP16 = changed(
    ("            out = model(x)\n            loss = criterion(out, y)\n            loss.backward()\n", "BODY"),
    ("            optimizer.step()\n", ""),
    ("    criterion =", "    scaler = torch.amp.GradScaler()\n    criterion ="),
    text=DDP,
)
BODY = """            with torch.autocast("cuda", dtype=torch.float16):
                out = model(x)
                loss = criterion(out, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
"""
UNSCALE, CLIP, STEP, UPDATE = (f"{line}\n" for line in BODY.splitlines()[4:])
OF_SCALERS = {  # what is changed -> a part of the gap or line
    (UNSCALE, ""): "gradients are clipped before they are unscaled",
    (f"{UNSCALE}{CLIP}", f"{CLIP}{UNSCALE}"): "gradients are unscaled once in a step, before they are clipped",
    ("scaler.step(optimizer)", "optimizer.step()"): "scaler.step(optimizer)",
    ("scaler.scale(loss).backward()", "loss.backward()"): "GradScaler does not scale this loss",
    (UPDATE, ""): "no update() of its GradScaler follows",
    (f"{STEP}{UPDATE}", f"{UPDATE}{STEP}"): "it is not called once after each step()",
    ("scaler.update()", "scaler.update(1.0)"): "new_scale=1.0",
    ("scaler.step(optimizer)", "scaler.step(optimizer, closure)"): "closure",
    (f"{CLIP}{STEP}", f"{STEP}{CLIP}"): "gradients are not clipped directly before it",
    ('("cuda", dtype=torch.float16):\n', "():\n                pass\n            if True:\n"): "its scope is unknown",
    ("GradScaler()", "GradScaler(enabled=False)"): "without an enabled GradScaler",
    ("GradScaler()", "GradScaler(init_scale=8.0)"): "GradScaler(init_scale=8.0) (it changes how a step is computed",
    ("        loader.sampler.set_epoch(epoch)\n", ""): "so every epoch has the same order",
    ("set_epoch(epoch)", "set_epoch(0)"): "so every epoch has the same order",
}
GUARD = "            if accelerator.sync_gradients:\n    "
CLIPPED = "            accelerator.clip_grad_norm_(model.parameters(), 1.0)\n"
OF_ACCELERATE = {
    "            optimizer.step()\n": {
        f"{CLIPPED}            optimizer.step()\n": "without `if accelerator.sync_gradients:`",
        f"{GUARD}{CLIPPED}            optimizer.step()\n": "",
        f"            if not accelerator.sync_gradients:\n    {CLIPPED}            optimizer.step()\n": "accumulate()",
    },
    "        with accelerator.accumulate(model):\n": {
        "        with accelerator.accumulate(model):\n            pass\n        if True:\n": "",
        "        if True:\n": "without accumulate() it only divides the loss",
        "        context = accelerator.accumulate(model)\n        if True:\n": "it is not entered once for each batch",
    },
    'mixed_precision="bf16"': {'mixed_precision="fp16"': ""},
}


def test_scaling_clipping_and_stepping_have_their_order() -> None:
    text = FP16.replace("BODY", BODY)
    usual = set(in_loop(text).splitlines())
    for pair, part in OF_SCALERS.items():
        more = "\n".join(set(in_loop(changed(pair, text=text)).splitlines()) - usual)
        assert part in more, (pair, more)


def test_accelerate_clips_whole_gradients() -> None:
    usual = set(in_loop(ACCELERATE).splitlines())
    for old, pairs in OF_ACCELERATE.items():
        for new, part in pairs.items():
            more = "\n".join(set(in_loop(changed((old, new), text=ACCELERATE)).splitlines()) - usual)
            assert part in more if part else not more, (new, more)
    clipped = ("            optimizer.step()\n", f"{GUARD}{CLIPPED}            optimizer.step()\n")
    fp16 = changed(clipped, ('"bf16"', '"fp16"'), text=ACCELERATE)
    assert "it clips fp16 gradients" not in in_loop(fp16)
    assert "it clips fp16 gradients" in in_loop(fp16.replace("accelerator.clip", "torch.nn.utils.clip"))


TEXT = """
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import *

set_seed(42)
data = load_dataset("acme/reviews")
data = data["train"].train_test_split(test_size=0.1)
tokenizer = AutoTokenizer.from_pretrained("acme/encoder")
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=64), batched=True)
data = data.shuffle(seed=1).flatten_indices().rename_column("stars", "labels").remove_columns(["text"])
data.set_format("torch", columns=["input_ids", "attention_mask", "labels"])
bits = BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForSequenceClassification.from_pretrained("acme/encoder", quantization_config=bits)
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=8, task_type="SEQ_CLS"))
model.gradient_checkpointing_enable()
collate = DataCollatorWithPadding(tokenizer)
stop = EarlyStoppingCallback(early_stopping_patience=2)
args = TrainingArguments(output_dir="out")
trainer = Trainer(model=model, args=args, train_dataset=data["train"], data_collator=collate, callbacks=[stop])
trainer.train()
"""
ROWS = datasets.Dataset
OF_TRAINERS: dict[
    str, tuple[str, Callable[..., Any]]
] = {  # name in the table -> the call without its last bracket, and it
    "set_seed": ("set_seed(42", transformers.set_seed),
    "rows.train_test_split": ("train_test_split(test_size=0.1", ROWS.train_test_split),
    "tokenizer.__call__": ('rows["text"], truncation=True, max_length=64', PreTrainedTokenizerBase.__call__),
    "rows.map": ("batched=True", ROWS.map),
    "rows.shuffle": ("shuffle(seed=1", ROWS.shuffle),
    "rows.flatten_indices": ("flatten_indices(", ROWS.flatten_indices),
    "rows.rename_column": ('"stars", "labels"', ROWS.rename_column),
    "rows.remove_columns": ('remove_columns(["text"]', ROWS.remove_columns),
    "rows.set_format": ('"attention_mask", "labels"]', ROWS.set_format),
    "BitsAndBytesConfig": ("load_in_4bit=True", transformers.BitsAndBytesConfig),
    "prepare_model_for_kbit_training": ("training(model", peft.prepare_model_for_kbit_training),
    "get_peft_model": ('task_type="SEQ_CLS")', peft.get_peft_model),
    "model.gradient_checkpointing_enable": ("checkpointing_enable(", PreTrainedModel.gradient_checkpointing_enable),
    "DataCollatorWithPadding": ("DataCollatorWithPadding(tokenizer", transformers.DataCollatorWithPadding),
    "EarlyStoppingCallback": ("early_stopping_patience=2", transformers.EarlyStoppingCallback),
    "trainer.train": ("trainer.train(", transformers.Trainer.train),
}


def gaps(text: str) -> str:
    draft = RunDraft(by_hand={"data.max_length": 64})
    import_config.script(Script(Path("train.py"), text)).move(draft, 1)
    return "\n".join(map(str, draft.deciding()))


def test_each_argument_of_the_real_signatures_is_on_a_list_or_refused_by_its_name() -> None:
    usual, text, unread = gaps(TEXT), TEXT, {}
    for name, (call, function) in OF_TRAINERS.items():
        row, parameters = call_arguments.TRAINERS[name], inspect.signature(function).parameters.values()
        listed = {each for part in ("order", "code", "quiet", "told") for each in row.get(part, ())}
        names = [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
        off = {each.name: each.default is True for each in parameters}
        unread[name] = [each for each in names if each not in listed and each != "self"] + ["of_no_release"]
        words = ", ".join(f"{each}={not off.get(each, False)}" for each in unread[name])
        assert call in text, call
        text = text.replace(call, f"{call}, {words}".replace("(, ", "("), 1)
    assert "no such setting" not in usual
    refused = gaps(text)
    for name, arguments in unread.items():
        for each in arguments:
            assert f"{name.rpartition('.')[2].replace('__call__', 'tokenizer')}({each}=" in refused, (name, each)
    assert len(unread) == 16


OBJECTS = {  # what is changed -> a part of the gap; None: nothing is refused
    ("data_collator=collate", "processing_class=other"): "processing_class=other (the line that creates it",
    ("data_collator=collate", "processing_class=tokenizer"): None,
    ("data_collator=collate", "peft_config=other"): "peft_config=other (the line that creates it",
    ("model=model,", "model_init=other,"): "model_init=other (the line that creates it",
    ("quantization_config=bits", "quantization_config=other"): "quantization_config=other (the line that creates it",
    ("quantization_config=bits", "config=other"): "config=other (the line that creates it",
    ("r=8,", "r=8, inference_mode=True,"): "inference_mode (an adapter",
    ("max_length=64)", "max_length=64, **more)"): "tokenizer(**more)",
    ("max_length=64)", "max_length=64, is_split_into_words=True)"): "is_split_into_words (texts",
    ("test_size=0.1", "train_size=0.9"): None,
    ("test_size=0.1", "test_size=0.1, train_size=0.5"): "train_size=0.5 (all rows",
    ("trainer.train()", "trainer.remove_callback(EarlyStoppingCallback)\ntrainer.train()"): "it removes a callback",
    ("trainer.train()", "trainer.pop_callback(EarlyStoppingCallback)\ntrainer.train()"): "it removes a callback",
    ("trainer.train()", "trainer.train()\ntrainer.remove_callback(EarlyStoppingCallback)"): None,
    ("trainer.train()", "trainer.train()\nmodel.merge_and_unload().save_pretrained('m')"): None,
    ("trainer.train()", "model = model.merge_and_unload()\ntrainer.train()"): "merge_and_unload() (its effect",
    ("trainer.train()", "with torch.autocast('cuda'):\n    trainer.train()"): "the effect of torch.autocast('cuda')",
    ("args = T", "class Own(Trainer):\n    pass\nOwn.compute_loss = f\nargs = T"): "Own.compute_loss = f (its",
    ("args = T", "class Own(Trainer):\n    pass\nsetattr(Own, 'compute_loss', f)\nargs = T"): "setattr(Own,",
    ("args = T", "import sys\nsys.modules['torch'] = f\nargs = T"): "sys.modules['torch'] = f (its",
    ("trainer.train()", "def go():\n    trainer.label_smoother = 1\ngo()\ntrainer.train()"): "trainer.label_smoother",
    ("trainer.train()", "def go(t=trainer):\n    t.label_smoother = 1\ngo()\ntrainer.train()"): "t.label_smoother",
    ("trainer.train()", "with mlflow.start_run():\n    trainer.train()"): None,
}


@pytest.mark.parametrize("pair", OBJECTS, ids=" ".join)
def test_objects_and_contexts_of_a_trainer_are_read_or_refused(pair: tuple[str, str]) -> None:
    assert pair[0] in TEXT
    refused, part = gaps(TEXT.replace(*pair)), OBJECTS[pair]
    assert part in refused if part else refused == gaps(TEXT)


VALUES = {  # what is changed -> the length that is read; None: it is not known
    ("s(rows", "s(rows, most=9"): 9,
    ("s(rows", "s(rows, most=9", "batched=True", "batched=True, fn_kwargs={'most': 7}"): 7,
    ("s(rows", "s(rows, most=9", "batched=True", "batched=True, fn_kwargs=more"): None,
    ("s(rows", "s(rows, most=9", "args = T", "tokens(0, 8)\nargs = T"): None,
    ("s(rows", "s(rows, most=9", "args = T", "print(tokens)\nargs = T"): None,
}


def test_parameters_have_the_values_of_their_functions_only_call() -> None:
    function = "def tokens(rows):\n    return tokenizer(rows['text'], truncation=True, max_length=most)\n"
    text = TEXT.replace('lambda rows: tokenizer(rows["text"], truncation=True, max_length=64)', "tokens")
    text = text.replace("data = data.map", f"{function}data = data.map")
    for pairs, length in VALUES.items():
        changed = text
        for old, new in zip(pairs[::2], pairs[1::2], strict=True):
            changed = changed.replace(old, new, 1)
        draft = RunDraft()
        import_config.script(Script(Path("train.py"), changed)).move(draft, 1)
        assert draft.keys.get("data.max_length") == length, pairs
