"""`lockstep init --from` converts files of other systems to run files; the pages have the same tables."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from lockstep.cli import main
from lockstep.config import error_messages as messages
from lockstep.config.run import Run, load
from lockstep.lab.import_config import axolotl, command_line, trainer
from lockstep.lab.import_config.table import KeyTranslation, Table
from support.documents import chapters
from support.messages import mentions

PAGE = chapters("how-to/coming-from.md", "how-to/coming-from-loops.md", "reference/coming-from")
TABLES: dict[str, Table] = {
    "Trainer": trainer.TABLE,
    "axolotl": axolotl.TABLE,
    "LLaMA-Factory": axolotl.LLAMA_FACTORY,
    "TRL": trainer.TRL,
    "Accelerate": command_line.ACCELERATE,
    "DeepSpeed": command_line.DEEPSPEED,
}
BLOCKS = re.findall(r"```(yaml|python)\n(.*?)```", PAGE, re.S)
OURS = {
    text.partition("\n")[0].removeprefix("# lockstep, "): text for _, text in BLOCKS if text.startswith("# lockstep")
}
# Keys that a run file may have.
KEYS = messages.keys_of(Run)


def moved(path: Path, *words: str) -> Run:
    assert main(["init", "moved.yaml", "--yes", "--force", "--from", str(path), *words]) == 0
    return load("moved.yaml", [])


def section(called: str) -> str:
    return PAGE.partition(f"\n## {called}\n")[2].partition("\n## ")[0]


# -- the page --------------------------------------------------------------------------------------------------------


def row(name: str, of: KeyTranslation) -> str:
    """Return a row of the table as the page prints it."""
    how = of.how.replace("|", "\\|")
    return f"| `{name}` | `{of.here}` | {how} |" if of.here else f"| `{name}` | {how} |"


@pytest.mark.parametrize("called", TABLES)
def test_the_page_has_the_tables(called: str) -> None:
    wanted = [row(name, of) for name, of in TABLES[called].items()]
    page = section(called).partition("A file of `accelerate config`:")
    there = [line for line in (page[2] or page[0]).splitlines() if re.match(r"\| `\w+` \|", line)]
    assert there == [*(r for r in wanted if r.count(" | ") == 2), *(r for r in wanted if r.count(" | ") == 1)]


@pytest.mark.parametrize("called", ["Accelerate", "A DDP script with torchrun", "Lightning", "torchtune", "AutoTrain"])
def test_keys_named_on_the_page_exist(called: str) -> None:
    lines = [
        line for line in section(called).splitlines() if line.count(" | ") >= 2 and not line.startswith("| theirs")
    ]
    found = [key for line in lines for key in re.findall(r"`([^`]+)`", line.split(" | ")[1])]
    assert len(lines) > 10
    assert [key for key in found if key not in KEYS] == []


@pytest.mark.parametrize("called", TABLES)
def test_keys_of_the_tables_exist(called: str) -> None:
    known = {*KEYS, "track.wandb.project", "track.wandb.entity"}
    assert [name for name, of in TABLES[called].items() if of.here and of.here not in known] == []
    assert [name for name, of in TABLES[called].items() if not of.here and not of.how] == []


def test_a_recipe_of_torchtune_is_refused_with_the_lines_to_write(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text(
        "model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_rank: 8, lora_alpha: 16}\n"
        "tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 512}\n"
        "optimizer: {_component_: torch.optim.AdamW, lr: 3e-4, weight_decay: 0.01}\n"
        "batch_size: 2\ngradient_accumulation_steps: 8\nepochs: 1\ndtype: bf16\n"
    )
    assert main(["init", "moved.yaml", "--yes", "--from", "recipe.yaml"]) == 2
    wanted = (
        "batch_size: 16 ",
        "micro_batches: 8",
        "block_size: 512",
        "learning_rate: 0.0003, weight_decay: 0.01",
        "r: 8",
    )
    mentions(capfd.readouterr().err, "LS8540", "lora_llama3_2_1b", "schedule: constant", *wanted)


@pytest.mark.parametrize("called", OURS)
def test_the_examples_load(called: str, here: Path) -> None:
    (here / "run.yaml").write_text(OURS[called])
    assert load("run.yaml", []).data.source


def test_every_foreign_system_has_an_example_run_file() -> None:
    assert len(OURS) == 5
    for called, examples in {"Trainer": 2, "axolotl": 2, "SageMaker": 2, "torchtune": 1, "AutoTrain": 1}.items():
        assert section(called).count("```yaml\n# lockstep, ") == 1
        assert section(called).count("```") == 2 * examples


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("train.py", ["launch.processes=4", "task.text=text", "task.label=label"]),
        ("axolotl.yaml", ["task.prompt=instruction"]),
    ],
)
def test_documented_example_becomes_the_documented_run_file(file: str, words: list[str], here: Path) -> None:
    theirs = next(text for _, text in BLOCKS if text.startswith(f"# {file}\n"))
    (here / file).write_text(theirs)
    (here / "ours.yaml").write_text(OURS[f"from {file}"])
    ours, run = load("ours.yaml", []), moved(here / file, *words)
    assert run.model_copy(update={"name": ours.name}).model_dump() == ours.model_dump()


def test_every_field_of_training_arguments_is_in_the_table() -> None:
    from transformers import Seq2SeqTrainingArguments

    assert [f.name for f in dataclasses.fields(Seq2SeqTrainingArguments) if f.name not in trainer.TABLE] == []


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-5}},
            {"schedule": "polynomial", "power": 2.0, "min_lr_ratio": 0.1},
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 7}},
            {"schedule": "wsd", "decay_steps": 7, "decay_shape": "cosine"},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
            {"schedule": "cosine", "min_lr_ratio": 0.2},
        ),
        (
            {"optim": "lion_32bit", "adam_beta1": 0.95, "adam_beta2": 0.98, "adam_epsilon": 1e-6},
            {"name": "lion", "betas": (0.95, 0.98)},
        ),
        ({"optim": "sgd", "adam_beta1": 0.95, "adam_epsilon": 1e-6}, {"name": "sgd", "momentum": 0.0}),
        ({"optim": "lion_32bit"}, {"name": "lion", "betas": (0.9, 0.999)}),
        ({"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}, {"name": "schedule_free"}),
    ],
)
def test_optimizers_and_schedules_of_trainer(theirs: dict, ours: dict, here: Path) -> None:
    given = {"output_dir": "o", "learning_rate": 1e-4, **theirs}
    (here / "args.json").write_text(json.dumps(given))
    optim = moved(here / "args.json").optim.model_dump()
    assert {key: optim[key] for key in ours} == ours


@pytest.mark.parametrize("optim", ["sgd", "lion_32bit", "adamw_torch"])
def test_defaults_of_trainers_optimizers(optim: str, here: Path) -> None:
    """The defaults are compared with the optimizer that transformers creates."""
    import torch
    from transformers import Trainer, TrainingArguments

    if optim == "lion_32bit":
        pytest.importorskip("bitsandbytes")
    (here / "args.json").write_text(json.dumps({"output_dir": "o", "optim": optim}))
    run = moved(here / "args.json").optim
    kind, options = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments("o", optim=optim, use_cpu=True))
    theirs = kind([torch.zeros(1, requires_grad=True)], **options).defaults
    ours = {key: value for key, value in run.model_dump().items() if key in ("betas", "eps", "momentum")}
    assert ours == {key: theirs[key] for key in ours}
    assert run.learning_rate == theirs["lr"]


@pytest.mark.parametrize(
    ("file", "values", "wanted"),
    [
        ("a.json", {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 3}}, "num_cycles: 3"),
        ("a.json", {"accelerator_config": {"split_batches": True}}, "accelerator_config: split_batches: True"),
        ("d.json", {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}}}, "optimizer: OneBitAdam"),
        ("d.json", {"optimizer": {"type": "AdamW", "params": {"bias_correction": True}}}, "optimizer: bias_correction"),
        ("d.json", {"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler: OneCycle"),
        (
            "d.json",
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}},
            "warmup_type, by default: log",
        ),
        (
            "d.json",
            {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": False}},
            "auto: train_batch_size, bf16 (",
        ),
        (
            "d.json",
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "bf16": {"enabled": True}},
            "auto: optimizer (",
        ),
        ("x.yaml", {"datasets": [{"path": "c/d", "type": "completion", "shards": 10}]}, "datasets: shards: 10"),
        (
            "x.yaml",
            {"datasets": [{"path": "c/d", "type": "chat_template", "roles_to_train": ["user"]}]},
            "datasets: roles_to_train: ['user']",
        ),
    ],
)
def test_deciding_settings_of_a_file_are_not_dropped_silently(
    file: str, values: dict, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = {"a": {"output_dir": "o"}, "d": {"train_batch_size": 8}, "x": {"base_model": "a/b", "micro_batch_size": 2}}
    (here / file).write_text(yaml.safe_dump(marks[file[0]] | values))
    if file.endswith(".json"):
        (here / file).write_text(json.dumps(marks[file[0]] | values))
    assert main(["init", "moved.yaml", "--yes", "--from", file]) == 2
    said = capsys.readouterr().err
    assert mentions(said, "LS8209")
    assert wanted in said


def test_defaults_of_deepspeed_schedules_and_optimizers(here: Path) -> None:
    params = {"total_num_steps": 5000, "warmup_type": "linear"}
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD"}, "scheduler": {"type": "WarmupCosineLR"}}
    config["scheduler"]["params"] = params  # type: ignore[index]
    (here / "ds.json").write_text(json.dumps(config))
    run = moved(here / "ds.json")
    assert (run.optim.schedule, run.optim.warmup_steps, run.optim.min_lr_ratio, run.steps) == (
        "cosine",
        1000,
        1e-4,
        5000,
    )
    assert (run.optim.learning_rate, run.optim.weight_decay, run.optim.momentum) == (1e-3, 0.0, 0.0)


def test_defaults_of_axolotl_and_llama_factory(here: Path) -> None:
    usual = {"base_model": "a/b", "micro_batch_size": 2, "datasets": [{"path": "c/d", "type": "completion"}]}
    for more, warm_up in (
        ({}, (0, 0.03)),
        ({"max_steps": 1000}, (30, 0.0)),
        ({"max_steps": 9000}, (100, 0.0)),
        ({"warmup_steps": 0}, (0, 0.0)),
        ({"lr_scheduler": "constant"}, (0, 0.0)),
    ):
        (here / "ax.yaml").write_text(yaml.safe_dump(usual | more))
        run = moved(here / "ax.yaml")
        assert (run.optim.warmup_steps, run.optim.warmup_fraction) == warm_up, more
        assert (run.task.options["block_size"], run.precision) == (512, "bf16")
    (here / "ax.yaml").write_text(yaml.safe_dump(usual | {"bf16": False}))
    assert moved(here / "ax.yaml").precision == "fp32"
    theirs = {"model_name_or_path": "a/b", "dataset": "c", "stage": "pt", "finetuning_type": "full"}
    (here / "lf.yaml").write_text(yaml.safe_dump(theirs))
    assert moved(here / "lf.yaml").task.options["block_size"] == 2048


# -- files -----------------------------------------------------------------------------------------------------------


def test_arguments_as_trainer_writes_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import TrainingArguments

    args = TrainingArguments(
        "out",
        learning_rate=1e-4,
        eval_strategy="steps",
        eval_steps=50,
        use_cpu=True,
        disable_tqdm=False,
        average_tokens_across_devices=False,
    )
    (here / "training_args.json").write_text(args.to_json_string())
    run = moved(here / "training_args.json")
    assert (run.seed, run.epochs, run.batch_size, run.micro_batches) == (42, 3, 8, 1)
    assert (run.optim.learning_rate, run.optim.weight_decay, run.optim.betas) == (1e-4, 0.0, (0.9, 0.999))
    assert (run.evaluate.every, run.checkpoint.every, run.launch.device) == (50, 500, "cpu")
    assert (run.data.source, run.model.source) == ("FILL-IN", "FILL-IN")
    said = capsys.readouterr().out
    assert "difference, on several processes: with average_tokens_across_devices false" in said
    assert "no counterpart" not in said  # nothing is set besides
    assert "fill in data.source and model.source" in said


def test_settings_without_a_counterpart_are_listed_with_the_reason(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {
        "tpu_num_cores": 8,
        "lr_scheduler_type": "cosine_with_restarts",
        "dataloader_num_workers": 4,
        "my_key": 1,
        "do_train": True,
    }
    (here / "args.json").write_text(json.dumps({"output_dir": "o", **asked}))
    assert main(["init", "moved.yaml", "--yes", "--from", "args.json"]) == 2
    refused = capsys.readouterr().err
    assert mentions(refused, "LS8209")
    assert "my_key" in refused
    assert "lr_scheduler_type" in refused
    assert "tpu_num_cores" not in refused  # which decides nothing
    assert not (here / "moved.yaml").exists()
    moved(here / "args.json", "--partial")
    said, text = capsys.readouterr().out, (here / "moved.yaml").read_text()
    for wanted in (
        "tpu_num_cores: 8 (",
        "lr_scheduler_type: cosine_with_restarts (optim.schedule is one of linear, cosine, constant",
        "dataloader_num_workers: 4 (",
        "my_key: 1 (unknown key)",
    ):
        assert f"no counterpart: {wanted}" in said
        assert f"#   {wanted[:30]}" in text
    assert "do_train" not in said


def test_a_script_is_read_and_not_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").write_text(
        "raise SystemExit('executed')\n"
        "SIZE = 4\n"
        "model = AutoModelForTokenClassification.from_pretrained('a/model')\n"
        "data = load_dataset('a/set', 'large')\n"
        "args = TrainingArguments(output_dir='o', per_device_train_batch_size=SIZE * 2, max_steps=100, seed=now(),\n"
        "    eval_strategy=IntervalStrategy.STEPS, eval_steps=0.1, **more)\n"
    )
    run = moved(here / "train.py", "launch.processes=2", "--partial")
    assert (run.task.name, run.model.source, run.data.source) == ("token_classification", "a/model", "a/set")
    assert (run.data.config, run.batch_size, run.steps, run.evaluate.every) == ("large", 16, 100, 10)
    assert run.seed == 42  # Trainer's default
    said = capsys.readouterr().out
    assert "not understood: line 5: seed=now() (its value is known only when the script runs" in said
    assert "**more" in said


def test_llama_factory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "sft.yaml").write_text(
        "model_name_or_path: a/model\nstage: sft\nfinetuning_type: lora\nlora_target: q_proj,v_proj\nlora_rank: 4\n"
        "dataset: mine, other\ncutoff_len: 512\nval_size: 0.2\ntemplate: llama3\nlearning_rate: 1.0e-4\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\n"
    )
    run = moved(here / "sft.yaml", "--partial")
    assert run.task.options["block_size"] == 512
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    assert (run.model.adapter, run.data.validation_fraction) == (adapter, 0.2)
    assert (run.batch_size, run.micro_batches, run.optim.warmup_fraction) == (16, 8, 0.1)
    said = capsys.readouterr().out
    assert "template: llama3" in said
    assert "dataset: other" in said


AXOLOTL = {"base_model": "a/b", "micro_batch_size": 2, "learning_rate": 1e-4, "val_set_size": 0.1}
AXOLOTL_TEXTS = AXOLOTL | {"datasets": [{"path": "c/d", "type": "completion", "field": "body"}]}
AXOLOTL_PAIRS = AXOLOTL | {"rl": "dpo", "datasets": [{"path": "c/d", "type": "chat_template.default"}]}


def test_packing_of_axolotl_and_llama_factory(here: Path) -> None:
    """Packed samples do not attend to each other in either system (in LLaMA-Factory with neat_packing)."""

    def packing(values: dict) -> tuple:
        (here / "t.yaml").write_text(yaml.safe_dump(values))
        options = moved(here / "t.yaml").task.options
        return options.get("packing"), options.get("attend_across_documents")

    assert packing(AXOLOTL_TEXTS | {"sample_packing": True}) == (True, False)
    assert packing(AXOLOTL_TEXTS) == packing(AXOLOTL_TEXTS | {"sample_packing": False}) == (False, True)
    theirs = {"model_name_or_path": "a/b", "dataset": "c", "cutoff_len": 64, "finetuning_type": "full"}
    assert packing(theirs | {"stage": "pt"}) == (True, True)
    assert packing(theirs | {"stage": "pt", "packing": False}) == (False, True)
    assert packing(theirs | {"stage": "pt", "neat_packing": True}) == (True, False)


def test_keys_of_axolotl_that_have_a_counterpart(here: Path) -> None:
    pairs = AXOLOTL_PAIRS | {"sample_packing": False, "activation_offloading": True, "save_strategy": "no"}
    (here / "p.yaml").write_text(yaml.safe_dump(pairs | {"gradient_checkpointing": True, "eval_strategy": "epoch"}))
    run = moved(here / "p.yaml", "launch.device=cuda")
    assert (run.task.name, run.model.offload_activations) == ("preference", True)
    assert (run.evaluate.every, run.checkpoint.every) == ("epoch", 0)
    texts = AXOLOTL | {"max_steps": 9, "sample_packing": True, "val_set_size": 0}
    source = {"path": "c/d", "name": "en", "type": "pretrain", "text_column": "body"}
    (here / "s.yaml").write_text(yaml.safe_dump(texts | {"pretraining_dataset": [source]}))
    run = moved(here / "s.yaml")
    assert (run.data.source, run.data.config, run.data.stream) == ("c/d", "en", True)
    assert (run.task.options["text"], run.task.options["attend_across_documents"], run.steps) == ("body", False, 9)


@pytest.mark.processes  # DeepSpeed starts some when it is imported
def test_accelerate_config(here: Path) -> None:
    (here / "config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 8\n"
        "main_process_ip: 10.0.0.1\nmain_process_port: 1234\nmixed_precision: bf16\n"
        "deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 2, offload_param_device: cpu}\n"
    )
    run = moved(here / "config.yaml")
    assert (run.launch.name, run.launch.processes, run.precision) == ("torchrun", 4, "bf16")
    assert (run.launch.options["machines"], run.launch.options["rendezvous"]) == (2, "10.0.0.1:1234")
    assert (run.strategy.name, run.micro_batches) == ("zero3", 16)
    assert run.strategy.options == {"zero_optimization": {"offload_param": {"device": "cpu"}}}


@pytest.mark.processes  # as above
def test_deepspeed_passes_through_untouched_but_for_what_the_run_file_says(here: Path) -> None:
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 9, "warmup_type": "linear"}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "cpu"},
        },
        "wall_clock_breakdown": False,
    }
    (here / "ds.json").write_text(json.dumps(config))
    run = moved(here / "ds.json")
    assert (run.batch_size, run.micro_batches, run.precision) == (64, 16, "bf16")
    assert (run.optim.max_grad_norm, run.optim.betas, run.optim.warmup_steps) == (0.5, (0.9, 0.95), 9)
    assert run.strategy.name == "zero2"
    assert run.strategy.options == {
        "wall_clock_breakdown": False,
        "zero_optimization": {"overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    }


def test_with_data_columns_and_intervals_follow(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.csv").write_text("".join(f"a text {i},{i % 3}\n" for i in range(200)))
    (here / "args.json").write_text(json.dumps({"eval_strategy": "epoch", "num_train_epochs": 2, "save_steps": 999}))
    run = moved(here / "args.json", "--data", "a.csv", "--model", "scratch")
    assert (run.data.columns, run.task.options["label"], run.model.type) == (["text", "label"], "label", "gpt2")
    assert run.evaluate.every == "epoch"
    assert "save_steps 999: the run has about" in capsys.readouterr().out
    (here / "args.json").write_text(json.dumps({"num_train_epochs": 2}))  # save_steps is 500 by default
    assert moved(here / "args.json", "--data", "a.csv", "--model", "scratch").checkpoint.every == 500
    assert "it never happens" not in capsys.readouterr().out


def test_parts_of_an_epoch_are_steps_once_the_data_are_known(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.jsonl").write_text("".join(json.dumps({"text": f"a text {i}"}) + "\n" for i in range(200)))
    (here / "ax.yaml").write_text("base_model: a/b\nmicro_batch_size: 9\nevals_per_epoch: 4\nsaves_per_epoch: 1\n")
    run = moved(here / "ax.yaml", "--data", "a.jsonl", "epochs=3")
    assert (run.evaluate.every, run.checkpoint.every, run.task.options["text"]) == (5, "epoch", "text")  # of 20
    assert moved(here / "ax.yaml").evaluate.every == "epoch"
    assert "no counterpart: evals_per_epoch 4 (evaluate.every is a number of steps" in capsys.readouterr().out


def test_data_that_the_task_cannot_read(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "a.jsonl").write_text("".join(json.dumps({"en": f"a {i}", "de": f"b {i}"}) + "\n" for i in range(40)))
    (here / "ax.yaml").write_text("base_model: a/b\nadapter: lora\nlora_r: 4\n")
    assert main(["init", "--from", "ax.yaml", "--data", "a.jsonl", "--task", "classification"]) == 2
    assert mentions(capfd.readouterr().err, "LS8201")
    run = moved(here / "ax.yaml", "--data", "a.jsonl", "--task", "translation", "--model", "scratch")
    assert (run.task.options["source"], run.model.type, run.model.adapter) == ("en", "marian", {})


def test_invalid_values_are_listed_as_gaps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "args.json").write_text(json.dumps({"learning_rate": -1, "num_train_epochs": 1}))
    assert moved(here / "args.json", "--partial").optim.learning_rate == 5e-5
    assert "no counterpart: learning_rate: -1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("training_args.bin", "x", "to_json_string"),
        ("a.json", "{", "line 1"),
        ("a.json", "[1]", "must contain a mapping"),
        ("a.yaml", "hello: 1\n", "no key that identifies it"),
        ("a.py", "x = (", "line 1"),
        ("a.py", "x = 1", "no Trainer of transformers"),
        ("a.py", "TrainingArguments()\nTrainingArguments()", "on lines 1, 2;"),
    ],
)
def test_unreadable_sources_are_refused(
    name: str, text: str, wanted: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / name).write_text(text)
    assert main(["init", "--yes", "--from", name]) == 2
    assert wanted in capfd.readouterr().err
    assert not (here / "run.yaml").exists()


def test_a_secret_of_the_file_is_not_written_into_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"a text {n},{n % 2}\n" for n in range(20)))
    (tmp_path / "run.sh").write_text(
        "HF_TOKEN=plainsecret1 python run_glue.py --model_name_or_path gpt2 --train_file train.csv --do_train "
        "--num_train_epochs 1 --output_dir out --hub_token plainsecret2 --token=plainsecret3\n"
    )
    (tmp_path / "axolotl.yaml").write_text(
        "base_model: gpt2\nmicro_batch_size: 2\nnum_epochs: 1\nsequence_len: 64\nhf_token: plainsecret4\n"
        "wandb_api_key: plainsecret5\ndatasets: [{path: train.csv, type: completion}]\n"
    )
    for file in ("run.sh", "axolotl.yaml"):
        assert main(["init", "moved.yaml", "--yes", "--force", "--partial", "--from", file]) == 0
        text = (tmp_path / "moved.yaml").read_text() + "".join(capfd.readouterr())
        assert "plainsecret" not in text
        assert "token: ***" in text
