"""`lockstep init --from` for scripts with a loop, for command lines, and for files that would train something else."""

import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from support.messages import mentions
from support.moving_scripts import ACCELERATE, DDP, LIGHTNING, NANO, QLORA, TRAINER, moved, refused

# -- loops -----------------------------------------------------------------------------------------------------------


def test_a_plain_loop_becomes_a_module(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run = moved("points.py", DDP)
    assert "points" not in sys.modules  # nothing was imported
    assert (run.task.name, run.strategy.name, run.seed) == ("module", "ddp", 0)
    options = {k: run.task.options[k] for k in ("model", "model_arguments", "data", "data_arguments", "loss")}
    assert options == {
        "model": "points.Net",
        "model_arguments": {"width": 32},
        "data": "points.Points",
        "data_arguments": {"count": 600},
        "loss": "torch.nn.CrossEntropyLoss",
    }
    assert (run.epochs, run.batch_size, run.optim.name, run.optim.learning_rate) == (4, 20, "sgd", 0.01)
    assert (run.optim.momentum, run.optim.weight_decay, run.optim.max_grad_norm, run.optim.schedule) == (
        0,
        0,
        0,
        "constant",
    )
    monkeypatch.syspath_prepend(here)
    assert main(["plan", "moved.yaml", "launch.device=cpu", "launch.processes=1"]) == 0  # which makes the model
    assert "points.Points: 540 train, 60 validation examples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Net(32)", "Net(width)"),
        ("criterion(out, y)", "criterion(out, y) + penalty(model)"),
        ("Points(600)", "Points(n)"),
    ],
)
def test_a_loop_without_importable_functions_is_named(
    old: str, new: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused("points.py", DDP.replace(old, new), capsys)
    assert "the script has a custom loop" in said
    assert "how-to/own-module on the site" in said
    run = moved("points.py", DDP.replace(old, new), "--partial")
    assert "FILL-IN" in run.task.options.values()
    assert run.batch_size == 20


def test_a_loop_that_runs_when_it_is_imported_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("points.py", DDP.replace('if __name__ == "__main__":\n    main()', "main()"), capsys)
    assert ": main() (every process imports the file and would run this" in said


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (
            "data = Points(600)",
            "data = Points(600)\n    model.load_state_dict(torch.load(FILE))",
            "model.load_state_dict(",
        ),
        (
            "sampler=Distributed",
            "sampler=Weighted",
            "sampler=WeightedSampler(data) (in lockstep each epoch has every example once",
        ),
        (
            "batch_size=20,",
            "batch_size=20, collate_fn=lambda rows: rows,",
            "collate_fn=lambda rows: rows (task.collate",
        ),
        ("batch_size=20", "**how", "the batch size (no DataLoader with one was found)"),
        (
            "    criterion =",
            "    for w in model.parameters():\n        w.requires_grad = False\n    criterion =",
            "w.requires_grad",
        ),
        ("lr=args.lr", "lr=args.lr, momentum=0.9, nesterov=True", "SGD(nesterov=True) (sgd has no such key)"),
        ("lr=args.lr", "lr=args.lr, momentum=beta", "SGD(momentum=beta) (its value is known only when"),
        ("optim.SGD(", "optim.AdamW(amsgrad=True, params=", "AdamW(amsgrad=True) (adamw has no such key)"),
        (
            "            optimizer.step()",
            "            nn.utils.clip_grad_value_(model.parameters(), 1.0)\n            optimizer.step()",
            "(optim.max_grad_norm is the largest norm of all gradients)",
        ),
    ],
)
def test_changes_of_model_and_batches_in_a_loop_are_refused(
    old: str, new: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wanted in refused("points.py", DDP.replace(old, new, 1), capsys)


CLIP = "            accelerator.clip_grad_norm_(model.{}, 1.0)\n            optimizer.step()"


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ('data["train"], shuffle', 'data["validation"], shuffle', "the loop trains on the split 'validation'"),
        (
            "shuffle=True,",
            'sampler=RandomSampler(data["train"], replacement=True),',
            "each epoch has every example once",
        ),
        ("shuffle=True,", 'sampler=RandomSampler(data["train"], num_samples=9),', "each epoch has every example once"),
        ("            schedule.step()\n", "", "its step() is never called"),
        ("            optimizer.step()", CLIP.format("classifier.parameters()"), "norm of all gradients together"),
        (
            "            optimizer.step()",
            CLIP.format("parameters()").replace("1.0)", "1.0, norm_type=1)"),
            "a Euclidean norm",
        ),
    ],
)
def test_which_weights_rows_and_rates_a_loop_takes_is_not_lost(
    old: str, new: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ACCELERATE.replace("import DataLoader", "import DataLoader, RandomSampler")
    assert text.count(old) == 1
    assert wanted in refused("acc.py", text.replace(old, new), capsys)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("shuffle=True,", 'sampler=RandomSampler(data["train"]),'),
        (
            "            optimizer.step()",
            "            if accelerator.sync_gradients:\n"
            "                accelerator.clip_grad_norm_(model.parameters(), 1.0, 2)\n            optimizer.step()",
        ),
    ],
)
def test_equivalent_forms_of_a_loop_are_read(old: str, new: str, here: Path) -> None:
    text = ACCELERATE.replace("import DataLoader", "import DataLoader, RandomSampler").replace(old, new)
    run = moved("acc.py", text)
    assert (run.batch_size, run.optim.schedule) == (32, "linear")
    assert run.optim.max_grad_norm == (1.0 if "clip" in new else 0.0)


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("num_warmup_steps=100,", "num_warmup_steps=100, num_cycles=2,", "num_cycles: 2 (optim has no such key)"),
        (
            "max_length=64)",
            "max_length=64, add_special_tokens=False)",
            "add_special_tokens (texts get the tokenizer's default",
        ),
        ("mixed_precision", "even_batches=False, mixed_precision", "even_batches=False (lockstep has no such setting"),
        (
            "mixed_precision",
            "step_scheduler_with_optimizer=False, mixed_precision",
            "step_scheduler_with_optimizer=False (lockstep has no such setting",
        ),
        ("mixed_precision", "fsdp_plugin=plugin, mixed_precision", "fsdp_plugin=plugin) (lockstep has no such setting"),
        (
            "max_length=64)",
            "max_length=64, padding_side='left')",
            "tokenizer(padding_side='left') (lockstep has no such",
        ),
        ("mixed_precision", "split_batches=True, mixed_precision", "split_batches=True (batch_size is a whole step's"),
        (
            "gradient_accumulation_steps=4",
            "gradient_accumulation_plugin=Plugin(4)",
            "gradient_accumulation_plugin=Plugin",
        ),
    ],
)
def test_decisions_of_an_accelerate_loop_are_refused_if_they_would_be_lost(
    old: str, new: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ACCELERATE.replace("get_linear_schedule", "get_cosine_schedule").replace(old, new)
    assert wanted in refused("acc.py", text, capsys)


@pytest.mark.parametrize(
    "argument", ["gradient_clip_algorithm='value'", "limit_train_batches=1", "overfit_batches=2", "fast_dev_run=True"]
)
def test_lightning_arguments_that_would_be_lost_are_refused(
    argument: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused("pl.py", LIGHTNING.replace("gradient_clip_val=1.0", f"gradient_clip_val=1.0, {argument}"), capsys)
    assert f": {argument.replace(chr(39), '')} (lockstep trains on all examples" in said


def test_optimizers_have_the_rates_and_decays_of_their_libraries() -> None:
    """The defaults are compared with the signatures of torch and bitsandbytes."""
    import inspect

    import torch

    from lockstep.lab.import_config.table import NAMES

    bits = pytest.importorskip("bitsandbytes")
    for name, ours in NAMES["optimizer_defaults"].items():
        kind = getattr(torch.optim, name, None) or getattr(bits.optim, name)
        theirs = inspect.signature(kind).parameters
        assert [theirs[key].default for key in ("lr", "weight_decay")] == ours, name
    assert NAMES["optimizer_defaults"].keys() == NAMES["optimizers"].keys()


def test_weights_that_a_loop_of_accelerate_freezes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ACCELERATE.replace("optimizer = torch", "model.classifier.weight.requires_grad = False\noptimizer = torch")
    assert "model.freeze names the weights" in refused("acc.py", text, capsys)


def test_a_loop_of_accelerate_with_a_model_of_transformers(here: Path) -> None:
    run = moved("acc.py", ACCELERATE)
    assert (run.task.name, run.task.options["text"], run.task.options["text_pair"]) == (
        "classification",
        "first",
        "second",
    )
    assert (run.batch_size, run.micro_batches, run.precision, run.seed) == (32, 4, "bf16", 3)
    assert (run.optim.schedule, run.optim.warmup_steps, run.optim.max_grad_norm) == ("linear", 100, 0)
    assert (run.optim.weight_decay, run.optim.groups) == (0.01, [])
    assert (
        "Note: difference: the original decays biases and norms by 0.01, lockstep does not"
        in (here / "moved.yaml").read_text()
    )


def test_a_seed_through_a_function_and_labels_that_are_numbered(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = "\ndef seeded(seed=5):\n    torch.manual_seed(seed)\n\nseeded(SEED)\n"
    text = ACCELERATE.replace("set_seed(3)\n", f"SEED = 9{seeds}")
    text = text.replace('load_dataset("acme/pairs")', 'load_dataset("acme/pairs").class_encode_column("label")')
    assert moved("acc.py", text).seed == 9
    shown = capsys.readouterr().out
    assert "torch.manual_seed(seed) -> seed" in shown
    assert "class_encode_column('label') -> nothing: lockstep also numbers texts in sorted order, but integers" in shown


@pytest.mark.parametrize(("name", "text"), [("pl.py", LIGHTNING), ("nano.py", NANO)])
def test_loops_that_cannot_be_moved_are_read_as_far_as_they_can(
    name: str, text: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "the script has a custom loop" in refused(name, text, capsys)
    run = moved(name, text, "--partial")
    if name == "pl.py":
        assert (run.epochs, run.batch_size, run.micro_batches, run.precision) == (5, 64, 4, "bf16")
        assert (run.launch.processes, run.optim.learning_rate, run.optim.max_grad_norm) == (2, 3e-5, 1.0)
    else:
        assert (run.steps, run.batch_size, run.micro_batches) == (600, 60, 5)
        assert (run.optim.betas, run.optim.weight_decay, run.optim.max_grad_norm) == ((0.9, 0.95), 0.1, 1.0)
        groups = "[{'params': model.head.parameters(), 'weight_decay': decay}]"
        ends = text.replace("model.parameters(), lr", f"{groups}, lr").replace("weight_decay=1e-1", "eps=1e-7")
        ends = f"decay = 0.3\niter_num = 0{ends}    iter_num += 1\n    if iter_num > max_iters:\n        break\n"
        run = moved(name, ends, "--partial")  # nanoGPT's loop makes max_iters + 1 steps
        assert (run.steps, run.optim.weight_decay, run.optim.learning_rate) == (601, 0.3, 6e-4)
        assert "(the largest of the groups of line 10, which were not read)" in Path("moved.yaml").read_text()


# -- command lines ---------------------------------------------------------------------------------------------------


def test_an_example_of_transformers_by_its_command(here: Path) -> None:
    text = (
        "#!/bin/bash\nexport TASK=mrpc\nCUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 run_glue.py \\\n"
        "  --model_name_or_path acme/encoder --task_name $TASK \\\n  --do_train --do_eval --max_seq_length 64 \\\n"
        "  --per_device_train_batch_size ${SIZE:-32} --learning_rate 2e-5 --output_dir /tmp/$TASK/\n"
    )
    run = moved("glue.sh", text)
    assert (run.data.source, run.data.config, run.data.max_length) == ("nyu-mll/glue", "mrpc", 64)
    assert (run.task.options["text"], run.task.options["text_pair"]) == ("sentence1", "sentence2")
    assert (run.batch_size, run.micro_batches, run.launch.processes) == (64, 2, 2)
    assert (run.optim.learning_rate, run.output) == (2e-5, "/tmp/mrpc/")


def test_a_script_with_the_options_of_its_command(here: Path) -> None:
    (here / "points.py").write_text(DDP)
    run = moved("run.sh", "torchrun --nproc-per-node 2 points.py --lr 0.5 >log.txt 2>err.txt &\n")
    assert (run.optim.learning_rate, run.epochs, run.batch_size, run.launch.processes) == (0.5, 4, 40, 2)


@pytest.mark.parametrize("words", ["--batch_size=32", "config/small.py", "lr=0.5"])
def test_words_that_no_parser_of_a_script_reads(words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words of nanoGPT's command line replace constants of the file."""
    (here / "nano.py").write_text(NANO)
    said = refused("run.sh", f"python nano.py {words}\n", capsys)
    assert f"line 1: {words.replace('=', ' ') if words[0] == '-' else words} (how the script uses it" in said


def test_a_script_of_dataclasses_needs_its_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINER.replace(
        'NAME = "acme/encoder"', "parser = HfArgumentParser(TrainingArguments)\nNAME = 'acme/encoder'"
    )
    text = text.replace(
        'args = TrainingArguments(output_dir="out", ARGUMENTS)', "(args,) = parser.parse_args_into_dataclasses()"
    )
    text = text.replace("EarlyStoppingCallback,", "EarlyStoppingCallback, HfArgumentParser,")
    assert mentions(refused("train.py", text, capsys), "LS8252")
    command = "accelerate launch --num_processes 4 --mixed_precision bf16 train.py --learning_rate 2e-5"
    run = moved("run.sh", f"{command} --eval_strategy epoch\n")
    assert (run.optim.learning_rate, run.batch_size, run.precision, run.launch.processes) == (2e-5, 32, "bf16", 4)


def test_commands_of_trl(here: Path) -> None:
    text = "trl dpo --model_name_or_path a/b --dataset_name c/d --beta 0.4 --use_peft --lora_r 8 --output_dir o\n"
    run = moved("dpo.sh", text)
    assert (run.task.name, run.task.options["beta"], run.model.adapter["r"]) == ("preference", 0.4, 8)


@pytest.mark.parametrize(
    "command", ["axolotl train", "accelerate launch -m axolotl.cli.train", "python -m axolotl.cli.train"]
)
def test_a_command_that_names_a_file_of_settings(command: str, here: Path) -> None:
    (here / "ax.yaml").write_text("base_model: a/b\nmicro_batch_size: 3\ndatasets: [{path: c/d, type: completion}]\n")
    run = moved("run.sh", f"{command} ax.yaml\n")
    assert (run.model.source, run.data.source, run.batch_size) == ("a/b", "c/d", 3)


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("axolotl train s.yaml --learning-rate 0.5", "base_model: a/b\ndatasets: [{path: c/d, type: completion}]\n"),
        (
            "llamafactory-cli train s.yaml learning_rate=0.5",
            "stage: pt\nmodel_name_or_path: a/b\ndataset: c\nfinetuning_type: full\n",
        ),
        ("trl sft --config s.yaml --learning_rate 0.5 --dataset_text_field body", "model_name_or_path: a/b\n"),
    ],
)
def test_options_behind_a_file_of_settings_go_before_it(command: str, file: str, here: Path) -> None:
    (here / "s.yaml").write_text(f"{file}learning_rate: 0.25\nseed: 7\n")
    run = moved("run.sh", f"{command}\n")
    assert (run.model.source, run.optim.learning_rate, run.seed) == ("a/b", 0.5, 7)
    if command.startswith("trl"):  # whose settings are TRL's, whether a key of the file says so or not
        assert (run.precision, run.task.options["text"], run.task.options["block_size"]) == ("bf16", "body", 1024)


def test_options_of_accelerate_launch_are_not_lost(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "run_glue.py --do_train --model_name_or_path a/b --task_name sst2 --output_dir o\n"
    launch = "accelerate launch --use_deepspeed --zero_stage 0 --gradient_accumulation_steps 4 --gradient_clipping 0.5 "
    said = refused("run.sh", launch + program, capsys)
    assert "--gradient_accumulation_steps 4 (micro_batches sets it)" in said
    assert "--gradient_clipping 0.5 (optim.max_grad_norm sets it)" in said
    run = moved("run.sh", launch + program, "micro_batches=4", "optim.max_grad_norm=0.5")
    assert run.strategy.name == "ddp"


@pytest.mark.processes  # DeepSpeed starts some when it is imported
def test_deepspeed_clips_by_default_where_a_loop_does_not(here: Path) -> None:
    """A config of DeepSpeed without gradient_clipping clips at 1.0, by way of Accelerate too."""
    (here / "train.py").write_text(CLIPLESS)
    (here / "ds.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\nmixed_precision: 'no'\nnum_processes: 2\n"
    )
    (here / "train.csv").write_text("text,label\na b,0\nc d,1\n")
    assert moved("run.sh", "accelerate launch --config_file ds.yaml train.py\n").optim.max_grad_norm == 1.0


CLIPLESS = """import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from datasets import load_dataset
from torch.utils.data import DataLoader

accelerator = Accelerator()
tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
data = load_dataset("csv", data_files="train.csv")["train"]
def encode(rows):
    return tokenizer(rows["text"], truncation=True, max_length=64)
data = data.map(encode, batched=True, remove_columns=["text"])
data = data.rename_column("label", "labels")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for epoch in range(2):
    for batch in loader:
        out = model(**batch)
        accelerator.backward(out.loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_explicit_entries_of_a_deepspeed_config_are_read(here: Path) -> None:
    (here / "ds.json").write_text(
        '{"bf16": {"enabled": true}, "fp16": {"enabled": "auto"}, "train_batch_size": "auto", "gradient_clipping": 0.5,'
        ' "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 0}}'
    )
    usual = "deepspeed --num_gpus 2 run_glue.py --do_train --model_name_or_path a/b --task_name sst2 --output_dir o "
    run = moved("run.sh", usual + "--deepspeed ds.json --per_device_train_batch_size 4 --learning_rate 3e-5\n")
    assert (run.precision, run.batch_size, run.optim.max_grad_norm) == ("bf16", 8, 0.5)
    assert run.optim.learning_rate == 3e-5


def test_a_schedule_of_deepspeed_is_not_that_of_the_trainer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's schedule is used, whatever schedule the Trainer's arguments name."""
    (here / "ds.json").write_text(
        '{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_type": "KIND"}}}'
    )
    usual = "deepspeed --num_gpus 2 run_glue.py --do_train --model_name_or_path a/b --task_name sst2 --output_dir o "
    assert "scheduler: warmup_type: KIND" in refused("run.sh", usual + "--deepspeed ds.json\n", capsys)
    (here / "ds.json").write_text((here / "ds.json").read_text().replace("KIND", "linear"))
    run = moved("run.sh", usual + "--deepspeed ds.json --warmup_steps 7\n")
    assert (run.optim.schedule, run.optim.warmup_steps) == ("constant", 7)


def test_options_of_other_examples(here: Path) -> None:
    usual = "python run_{}.py --do_train --model_name_or_path a/b --dataset_name c/d --output_dir o "
    run = moved(
        "s.sh", usual.format("summarization") + "--text_column long --summary_column short --max_target_length 40\n"
    )
    options = {key: run.task.options[key] for key in ("source", "target", "target_length")}
    assert (run.task.name, options) == ("summarization", {"source": "long", "target": "short", "target_length": 40})
    assert (
        moved("t.sh", usual.format("translation") + "--source_lang en --target_lang de\n").task.options["target_length"]
        == 128
    )  # by default of transformers' script
    run = moved("q.sh", usual.format("qa") + "--version_2_with_negative --doc_stride 64 --max_seq_length 384\n")
    options = {key: run.task.options[key] for key in ("unanswerable", "stride")}
    assert (run.task.name, options, run.data.max_length) == (
        "question_answering",
        {"unanswerable": True, "stride": 64},
        384,
    )


def test_a_command_whose_script_is_missing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "torchrun --nproc_per_node 2 train.py --learning_rate 2e-5 --output_dir o\n"
    assert "the script is missing" in refused("run.sh", text, capsys)
    assert mentions(refused("b.sh", "python a.py\npython b.py\n", capsys), "LS8190", "1", "2")
    assert moved("run.sh", text, "--task", "classification").optim.learning_rate == 2e-5


# -- other files -----------------------------------------------------------------------------------------------------


def test_rewards_and_pairs_of_axolotl(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = "base_model: a/b\nsequence_len: 900\ndatasets: [{path: c/d, type: chat_template.default}]\n"
    run = moved("ax.yaml", usual + "rl: simpo\nrl_beta: 2.0\nsimpo_gamma: 1.0\nadapter: qlora\nlora_r: 4\n")
    assert (run.task.name, run.task.options["loss"], run.task.options["gamma"]) == ("preference", "simpo", 1.0)
    assert (run.data.max_length, run.model.quantization, run.task.options["prompt"]) == (900, "nf4", "messages")
    assert (run.optim.weight_decay, run.optim.schedule) == (0.0, "cosine")  # axolotl's defaults
    run = moved("ax.yaml", usual + "reward_model: true\ncenter_rewards_coefficient: 0.01\n")
    assert (run.task.name, run.task.options["center"]) == ("reward", 0.01)
    (here / "moved.yaml").unlink()
    assert mentions(refused("ax.yaml", usual + "rl: kto\n", capsys, "--partial"), "LS8180")


def test_rewards_and_pairs_of_llama_factory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = "model_name_or_path: a/b\nfinetuning_type: lora\ndataset: mine\ncutoff_len: 700\ntemplate: qwen\n"
    run = moved("lf.yaml", usual + "stage: dpo\npref_beta: 0.2\npref_loss: hinge\nquantization_bit: 4\n")
    assert (run.task.name, run.task.options["loss"], run.task.options["beta"]) == ("preference", "hinge", 0.2)
    assert (run.data.max_length, run.model.quantization, run.task.options["conversations"]) == (700, "nf4", True)
    assert moved("lf.yaml", usual + "stage: rm\n").task.name == "reward"
    run = moved(
        "lf.yaml",
        usual + "stage: sft\npref_beta: 0.2\n",
        "--task",
        "preference",
        "task.conversations=true",
        "--partial",
    )
    assert (run.data.max_length, run.task.options["beta"]) == (700, 0.2)
    (here / "moved.yaml").unlink()
    assert mentions(refused("lf.yaml", usual + "stage: dpo\npref_loss: orpo\n", capsys), "LS8181", "pref_loss")
    assert "quantization_bit: 8" in refused("lf.yaml", usual + "stage: pt\nquantization_bit: 8\n", capsys)


def test_alpaca_input_column_is_not_dropped_silently(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.jsonl").write_text('{"instruction": "add", "input": "1 2", "output": "3"}\n' * 40)
    text = QLORA.replace(
        'load_dataset("acme/notes", split="train")', 'load_dataset("json", data_files="a.jsonl")["train"]'
    )
    text = text.replace(', dataset_text_field="text"', "").replace("MORE", "")
    said = refused("sft.py", text, capsys, "--data", "a.jsonl")
    assert "column input of" in said
    run = moved("sft.py", text, "--data", "a.jsonl", "task.prompt=instruction", "task.response=output")
    assert (run.task.options["prompt"], run.task.options["response"]) == ("instruction", "output")


@pytest.mark.processes  # DeepSpeed starts some when it is imported
def test_run_files_that_plan_would_refuse_are_not_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: fp16\n"
        "deepspeed_config: {zero_stage: 2}\n"
    )
    said = refused("config.yaml", text, capsys)
    assert mentions(said, "LS4143", "lockstep plan would refuse", "precision: ")
    assert moved("config.yaml", text, "precision=bf16").strategy.name == "zero2"
    assert moved("config.yaml", text, "--partial").precision == "fp16"


def test_alpaca_prompt_sentences_must_be_written_by_hand(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "base_model: a/b\ndatasets: [{path: c/d, type: alpaca}]\n"
    sentences = r"appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n[### Input:\n{input}\n\n]"
    mentions(refused("axolotl.yaml", text, capsys), "LS8209", sentences, "task.prompt=COLUMN")
    assert moved("axolotl.yaml", text, "task.prompt=whole").task.options["prompt"] == "whole"
