"""`lockstep init --from`: each argument of each call that a loop's reader takes, by the libraries' signatures."""

import ast
import inspect
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch.distributed import fsdp
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

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
